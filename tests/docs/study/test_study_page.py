"""Claims about the page of the study: it is made anew from its rows, and its marks are kept."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.study.page import BEGIN, END, heat_map, write_page
from docs.study.trials import Point, ProbeRow, StudyRow, read_lines, read_rows
from offbeat.common.errors import SettingError

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[3] / "docs"


def make_row(method: str, seed: int, final: float, *, noise: float = 0.0) -> StudyRow:
    return StudyRow(
        "reversal", method, 4, noise, seed, ("train.num_steps=5",), "finished", 5, final, 36.0, (Point(0, 0.1), Point(5, final))
    )


ROWS = [make_row("gspo", 0, 0.5), make_row("gspo", 1, 0.6), make_row("grpo", 0, 0.8), make_row("grpo", 1, 0.901)]


def test_results_are_put_between_the_marks_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nearlier\n{END}\nafter\n")
    written = write_page(ROWS, [], page)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "earlier" not in text
    assert written == [page, tmp_path / "page" / "reversal.svg"]
    assert "| `reversal` | 4 | 2 | 4 | 0 | 2 | 0 | 36 | 0.04 |" in text
    # Differences of 0.3 and 0.301 hardly spread: marked.
    assert "| `grpo` | 2 | 0.851 | 0.642 | **+0.301 (+0.294 to +0.307)** |" in text
    # Those of 0.3 and 0.30001 do not: an interval of no width is no certainty, and there is no test.
    write_page([*ROWS[:3], make_row("grpo", 1, 0.90001)], [], page)
    assert "| `grpo` | 2 | 0.850 | 0.635 | +0.300 | – |" in page.read_text()
    write_page(ROWS, [], page)
    assert text.index("| `grpo`") < text.index("| `gspo`"), "the best comes first"
    again = page.read_bytes()
    write_page(ROWS, [], page)
    assert page.read_bytes() == again


def test_methods_are_compared_with_the_default_where_a_task_has_no_run_of_the_baseline(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    own = [make_row("gspo + own length", 0, 0.5), make_row("gspo + own length", 1, 0.6)]
    write_page([*own, *ROWS[2:]], [], page)
    assert "| minus gspo + own length |" in page.read_text()
    assert "| `grpo` | 2 | 0.851 | 0.642 | **+0.301 (+0.294 to +0.307)** |" in page.read_text()
    write_page([*own, *ROWS], [], page)
    assert "| minus gspo |" in page.read_text()


def test_only_the_generated_results_say_that_a_claim_is_confirmed() -> None:
    before, _, rest = (DOCS / "study.md").read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    for line in (before + after).splitlines():
        assert "confirmed" not in line.replace("Whether a claim is confirmed", ""), line


def test_a_page_without_marks_or_rows_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n")
    with pytest.raises(SettingError, match="no marks"):
        write_page(ROWS, [], page)
    with pytest.raises(SettingError, match="no rows"):
        write_page([], [], page)
    assert page.read_text() == f"{BEGIN}\n"


def test_a_page_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r'--page = ".*/missing.md": it cannot be read \(No such file'):
        write_page(ROWS, [], tmp_path / "missing.md")
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}{END}")
    (tmp_path / "page").touch()
    with pytest.raises(SettingError, match=r'--page = ".*/page.md": .*/page cannot be written \(File exists'):
        write_page(ROWS, [], page)
    assert page.read_text() == f"{BEGIN}{END}"


def test_noise_has_a_table_and_a_picture_of_its_own(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}{END}")
    write_page([*ROWS, make_row("gspo", 0, 0.1, noise=0.05)], [], page)
    assert sorted(file.name for file in (tmp_path / "page").iterdir()) == ["reversal-noise-0.05.svg", "reversal.svg"]
    assert "### `reversal`, noise 0.05" in page.read_text()


def test_picture_has_a_number_for_every_run_and_is_xml() -> None:
    svg = heat_map("a < b", ["gspo", "x & y"], [0, 64], {("gspo", 0): 1.0, ("x & y", 64): 0.256})
    texts = [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["a < b", "lag", "0", "64", "gspo", "1.00", "x & y", "0.26"]
    assert 'fill="#2166ac"' in svg, "a reward of 1 is blue"


def test_the_page_in_the_docs_is_that_of_its_rows(tmp_path: Path) -> None:
    page = tmp_path / "study.md"
    page.write_text((DOCS / "study.md").read_text())
    for file in write_page(read_rows(DOCS / "study"), read_lines(DOCS / "study/probe.jsonl", ProbeRow), page):
        assert file.read_bytes() == (DOCS / file.relative_to(tmp_path)).read_bytes(), f"docs.study --page {file}"
