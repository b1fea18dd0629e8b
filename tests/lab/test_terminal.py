"""Tables fit any terminal without a broken word or number, and long texts go through a pager."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from offbeat.lab import terminal
from offbeat.lab.terminal import FittedTable, fit_columns, page


def printed(width: int) -> list[str]:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("what")
    for name in ("alpha", "beta", "gamma\ndelta"):
        table.add_column(name, justify="right")
    table.add_row("a remark of several words that wraps", "1,234,567", "0.5", "12.345")
    console = Console(file=io.StringIO(), width=width)
    console.print(FittedTable(table))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_wide_terminal_shows_every_column_on_one_line() -> None:
    assert "a remark of several words that wraps 1,234,567 0.5 12.345" in printed(80)


def test_narrow_terminal_wraps_text_then_leaves_out_the_last_numbers_and_names_them() -> None:
    lines = printed(50)
    assert any(line.endswith("1,234,567 0.5 12.345") for line in lines), "the text alone is wrapped"
    lines = printed(40)
    assert any(line.endswith("1,234,567 0.5") for line in lines) and lines[-1] == "left out at 40 columns: gamma delta"
    lines = printed(36)
    assert any(line.endswith("1,234,567") for line in lines)
    assert " ".join(lines[-2:]).endswith("left out at 36 columns: beta, gamma delta")
    assert "alpha" in lines[0]


def claims(width: int, word: str) -> list[str]:
    table = Table("claim", "", "detail")
    table.add_row("a claim of several words, so that it wraps", "VIOLATION", f"it was {word} and nothing else")
    console = Console(file=io.StringIO(), width=width)
    console.print(FittedTable(table))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_text_is_narrowed_without_breaking_its_longest_word() -> None:
    for width in (74, 80, 90):
        lines = claims(width, "a/file/with/thirty/letters.toml")
        assert max(map(len, lines)) <= width
        assert any("a/file/with/thirty/letters.toml" in line for line in lines)
    assert len(claims(150, "short")) == 5, "a wide terminal has room for each text on one line"


def test_word_longer_than_the_terminal_is_broken_and_nothing_of_it_is_lost() -> None:
    word = "".join(chr(ord("a") + index % 26) for index in range(90))
    lines = claims(60, word)
    assert max(map(len, lines)) <= 60
    assert word in "".join(line.split("│")[3].strip() for line in lines if line.startswith("│"))
    assert any("VIOLATION" in line for line in lines)


def test_only_dispensable_columns_are_left_out_in_their_order() -> None:
    table = Table("name", "remark")
    table.add_column("number", justify="right")
    table.add_row("abcdefgh", "ijklmnop", "12345678")
    console = Console(file=io.StringIO())
    shown = [fit_columns(table, console, width, ("remark", "name")) for width in (40, 30, 20)]
    assert [left_out for _, left_out in shown] == [[], ["remark"], ["name", "remark"]]
    assert [len(fitted.columns) for fitted, _ in shown] == [3, 2, 1]


def test_pager_is_for_long_text_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paged: list[str] = []
    monkeypatch.setattr(terminal.pydoc, "pager", paged.append)
    long = "line\n" * 500
    page(long)
    assert capsys.readouterr().out == f"{long}\n" and paged == []
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: True)
    page(long)
    page("short")
    assert paged == [long] and capsys.readouterr().out == "short\n"
