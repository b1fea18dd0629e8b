"""The terminal that commands print on: its width, a pager for what is longer than it is high."""

import copy
import pydoc
import shutil
import sys

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

PIPE_WIDTH = 150
"""Width in columns where stdout is a pipe or a file, so that tables are not cut."""


TEXT_WIDTH = 24
"""Width down to which a column of text is wrapped before a column of numbers is left out."""
WIDE = 10_000
"""Width at which no table is cut."""


def stdout_console() -> Console:
    """Return a console as wide as the terminal, or `PIPE_WIDTH` wide without one."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def page(text: str) -> None:
    """Print the text, through the user's pager (`PAGER`) where it is longer than the terminal is high."""
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        pydoc.pager(text)
    else:
        print(text)


class FittedTable:
    """A table that leaves out columns where the terminal is too narrow, and names them; it breaks no number and no word.

    Columns aligned to the right hold numbers. The last ones are left out first, so the first ones should tell most.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fitted, left_out = fit_columns(self._table, console, options.max_width)
        yield fitted
        if left_out:
            yield Text(f"left out at {options.max_width} columns: {', '.join(left_out)}", style="dim")


def fit_columns(table: Table, console: Console, width: int) -> tuple[Table, list[str]]:
    """Return the table without the columns of numbers for which `width` has no room, and the heads of these."""
    fitted = copy.copy(table)
    fitted.columns = [copy.copy(column) for column in table.columns]
    for column in fitted.columns:
        natural_width = _natural_width(column, console)
        column.no_wrap = column.justify == "right"
        column.min_width = natural_width if column.no_wrap else min(TEXT_WIDTH, natural_width)
    left_out: list[str] = []
    while _least_width(fitted, console) > width:
        numbers = [column for column in fitted.columns if column.justify == "right"]
        if not numbers:
            break
        fitted.columns.remove(numbers[-1])
        left_out.insert(0, str(numbers[-1].header).replace("\n", " "))
    return fitted, left_out


def _least_width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=WIDE), table).minimum


def _natural_width(column: Column, console: Console) -> int:
    cells = [column.header, *column.cells]
    return max(Measurement.get(console, console.options.update(max_width=WIDE), cell).maximum for cell in cells)
