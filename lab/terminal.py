"""The terminal that commands print on: its width, a pager for what is longer than it is high."""

import copy
import json
import pydoc
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from offbeat.protocols.text import plain_json

PIPE_WIDTH = 150
"""Width in columns where stdout is a pipe or a file, so that tables are not cut."""
TEXT_WIDTH = 24
"""Width down to which a column of text is wrapped before a column of numbers is left out."""
WIDE = 10_000
"""Width at which no table is cut."""


def stdout_console() -> Console:
    """Return a console as wide as the terminal, or `PIPE_WIDTH` wide without one."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def print_result(value: object, shown: RenderableType, *, as_json: bool) -> None:
    """Print what a command has found: the value as JSON, or as it is shown to people."""
    if as_json:
        print_json(value)
    else:
        stdout_console().print(shown)


def print_json(value: object) -> None:
    """Print the value as JSON that a terminal shows as it is."""
    text = msgspec.json.format(plain_json(msgspec.json.encode(value).decode()))
    # JSON has escapes of its own for characters that a terminal without UTF-8 has not.
    print(text if (sys.stdout.encoding or "utf-8").lower().startswith("utf") else json.dumps(json.loads(text), indent=2))


def page(text: str) -> None:
    """Print the text, through the user's pager (`PAGER`) where it is longer than the terminal is high."""
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        pydoc.pager(text)
    else:
        print(text)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    texts: Collection[str] | None = None,
    title: str = "",
    dispensable: Sequence[str] | None = None,
) -> "FittedTable":
    """Return a table whose cells are shown as they are, without markup. A blank line stands before its title.

    Columns whose head is among `texts` hold words, the others numbers; None: the first holds words. `dispensable` is that of
    `FittedTable`.
    """
    made = Table(title=f"\n{title}" if title else None, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in head:
        made.add_column(name, justify="left" if name in (head[:1] if texts is None else texts) else "right")
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return FittedTable(made, dispensable=dispensable)


class FittedTable:
    """A table that leaves out columns where the terminal is too narrow, and names them; it breaks no number and no word.

    Columns aligned to the right hold numbers. The last ones are left out first, so the first ones should tell most.
    Words are broken only where the longest of them still have no room.
    """

    def __init__(self, table: Table, *, dispensable: Sequence[str] | None = None) -> None:
        """`dispensable`: heads of the columns that may be left out, the least important first; None: those of numbers."""
        self._table = table
        self._dispensable = dispensable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fitted, left_out = fit_columns(self._table, console, options.max_width, self._dispensable)
        yield fitted
        if left_out:
            yield Text(f"left out at {options.max_width} columns: {', '.join(left_out)}", style="dim")


def fit_columns(
    table: Table, console: Console, width: int, dispensable: Sequence[str] | None = None
) -> tuple[Table, list[str]]:
    """Return the table without the columns for which `width` has no room, and the heads of these, the most important first.

    `dispensable` is that of `FittedTable`.
    """
    shown = [_sized(column, console) for column in table.columns]
    if dispensable is None:
        candidates = [one for one in reversed(shown) if one.column.no_wrap]
    else:
        candidates = [one for head in dispensable for one in shown if one.column.header == head]
    left_out: list[str] = []
    fitted = copy.copy(table)
    fitted.columns = [one.column for one in shown]
    while candidates and _width(fitted, console) > width:
        dropped = candidates.pop(0)
        shown.remove(dropped)
        fitted.columns = [one.column for one in shown]
        left_out.insert(0, str(dropped.column.header).replace("\n", " "))
    _share(width - _width(fitted, console), [one for one in shown if not one.column.no_wrap])
    return fitted, left_out


class _Sized(NamedTuple):
    """A column with the bounds of its width."""

    column: Column
    least: int
    """Width of its longest number, or the one down to which its text is wrapped."""
    natural: int
    """Width of its longest line."""


def _sized(column: Column, console: Console) -> _Sized:
    """Return a copy of the column that is as narrow as it may be."""
    column = copy.copy(column)
    options = console.options.update(max_width=WIDE)
    cells = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
    natural = max(cell.maximum for cell in cells)
    column.no_wrap = column.justify == "right"
    column.overflow = "fold"
    column.width = natural if column.no_wrap else max(min(TEXT_WIDTH, natural), *(cell.minimum for cell in cells))
    return _Sized(column, column.width, natural)


def _share(spare: int, texts: Sequence[_Sized]) -> None:
    """Widen columns of text by `spare` in all, the narrowest first, and none beyond its natural width."""
    widths = [one.least for one in texts]
    for _ in range(spare):
        growing = [index for index, one in enumerate(texts) if widths[index] < one.natural]
        if not growing:
            break
        widths[min(growing, key=widths.__getitem__)] += 1
    for one, width in zip(texts, widths, strict=True):
        # Where the longest words have no room, the library breaks them.
        one.column.width = width if spare >= 0 else None


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=WIDE), table).maximum
