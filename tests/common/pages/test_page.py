"""Claims about `common.pages.page`: every block is shown, its text is never markup, and only the page's own scripts run."""

import base64
import hashlib
import html
import re
from pathlib import Path

import pytest

from offbeat.common.errors import ServiceError
from offbeat.common.pages.figures import Plot, line_trace, plot_layout
from offbeat.common.pages.page import (
    Block,
    Bullets,
    Caption,
    Card,
    Folded,
    Grid,
    KeyFigure,
    LinkedText,
    Mark,
    Missing,
    NamedNumbers,
    NotedText,
    Page,
    PageHead,
    PageSection,
    Sentence,
    Sum,
    Table,
    Term,
    Tiles,
    page_html,
    sections_html,
    write_page,
)

ATTACK = "</script></style><script>alert(1)</script>\"'><img onerror=x>"


def plot(text: str = "", *, traces: bool = True) -> Plot:
    layout = plot_layout(text, text)
    layout["annotations"].append({"text": text, "showarrow": False})
    return Plot(text, text, [line_trace([1, 2], [1, 2], text, "#123456")] if traces else [], layout, missing=text)


def every_block(text: str) -> list[Block]:
    """Return one block of each kind, with this text wherever a text may stand."""
    cells = (text, Mark(text, "good"), LinkedText(text, text), NotedText(text, text))
    return [
        plot(text),
        plot(text, traces=False),
        Grid([plot(text), Card([Sentence(text)], is_wide=True)]),
        Table([text] * 4, [cells], 1),
        Sentence(text, "bad"),
        Bullets([text]),
        NamedNumbers({text: 1}),
        Caption(text),
        Missing([text]),
        Sum(Term(text, 3, "whole"), [Term(text, 1, "calm"), Term(text, 2, "bad")]),
        Folded(text, text, [text]),
    ]


def page_of(*blocks: Block, text: str = "x") -> Page:
    tiles = Tiles([KeyFigure(text, text, text, text)])
    return Page(PageHead(text, "good", text, text, {text: text}), tiles, [PageSection(text, text, blocks)], text)


def test_no_text_of_any_block_is_markup() -> None:
    page = page_html(page_of(*every_block(ATTACK), text=ATTACK))
    rest = re.sub(r"<style>.*?</style>|<script.*?</script>", "", page, flags=re.DOTALL)
    assert "<img" not in rest and "<script" not in page.replace("<script>", "", 2).replace(
        '<script type="application/json"', ""
    )
    assert rest.count("alert(1)") > 25, "each is there, as text"
    json_of_figures = re.findall(r'class="figure">(.*?)</script>', page)
    assert len(json_of_figures) == 2
    assert all("<" not in text and "alert(1)" in text for text in json_of_figures)


def test_labels_of_figures_are_no_tags_for_plotly_either() -> None:
    (text,) = re.findall(r'class="figure">(.*?)</script>', sections_html(page_of(plot("<b>&"))))
    assert text.count("&lt;b&gt;&amp;") == 4, "the line's name, both axes and the annotation"
    assert "%{y:.3~g}" in text, "templates of ours stay as they are"


def test_every_kind_of_block_shows_its_text() -> None:
    for block in every_block("this text"):
        assert "this text" in html.unescape(sections_html(page_of(block)))


def test_rows_of_text_alone_may_be_stacked_where_the_page_is_narrow() -> None:
    assert "<table class=texts>" in sections_html(page_of(Table(["a", "b"], [["x", "a sentence"]], 2)))
    assert "<table>" in sections_html(page_of(Table(["a", "b"], [["x", "1"]], 1)))


def test_browser_is_told_to_run_the_scripts_of_the_page_and_no_others() -> None:
    page = page_html(page_of(plot("x")))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"


def test_page_without_figures_carries_no_script_and_allows_none() -> None:
    page = page_html(page_of(plot("x", traces=False)))
    assert "script-src" not in page and "<script>" not in page
    assert len(page) < 20_000


def test_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ServiceError, match="cannot be written"):
        write_page(tmp_path / "taken", page_of())
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_page_below_a_file_is_refused_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServiceError, match=r"\(Not a directory\)\. .* choose a folder"):
        write_page(tmp_path / "file" / "page.html", page_of())
