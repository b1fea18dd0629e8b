"""The terminal that commands print on: its width, a pager for what is longer than it is high."""

import copy
import json
import pydoc
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence

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
    fitted = copy.copy(table)
    fitted.columns = [_narrowed(column, console) for column in table.columns]
    if dispensable is None:
        candidates = [column for column in reversed(fitted.columns) if column.no_wrap]
    else:
        candidates = [column for head in dispensable for column in fitted.columns if column.header == head]
    left_out: list[str] = []
    while candidates and _width(fitted, console) > width:
        dropped = candidates.pop(0)
        fitted.columns = [column for column in fitted.columns if column is not dropped]
        left_out.insert(0, str(dropped.header).replace("\n", " "))
    _share(width - _width(fitted, console), [column for column in fitted.columns if not column.no_wrap], console)
    return fitted, left_out


def _widths(column: Column, console: Console) -> list[Measurement]:
    """Return the widths of a column's head and cells: that of the longest word, and that of the longest line."""
    options = console.options.update(max_width=WIDE)
    return [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]


def _narrowed(column: Column, console: Console) -> Column:
    """Return a copy of the column that is as narrow as it may be: numbers keep to one line, texts are wrapped."""
    column = copy.copy(column)
    cells = _widths(column, console)
    natural = max(cell.maximum for cell in cells)
    column.no_wrap = column.justify == "right"
    column.overflow = "fold"
    column.width = natural if column.no_wrap else max(min(TEXT_WIDTH, natural), *(cell.minimum for cell in cells))
    return column


def _share(spare: int, texts: Sequence[Column], console: Console) -> None:
    """Widen columns of text by `spare` in all, the narrowest first, and none beyond its longest line."""
    widths = [column.width or 0 for column in texts]
    most = [max(cell.maximum for cell in _widths(column, console)) for column in texts]
    for _ in range(spare):
        growing = [index for index, width in enumerate(widths) if width < most[index]]
        if not growing:
            break
        widths[min(growing, key=widths.__getitem__)] += 1
    for column, width in zip(texts, widths, strict=True):
        # Where the longest words have no room, the library breaks them.
        column.width = width if spare >= 0 else None


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=WIDE), table).maximum
