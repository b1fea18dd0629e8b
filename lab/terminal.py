"""The terminal that commands print on: its width, a pager for what is longer than it is high."""

import pydoc
import shutil
import sys

from rich.console import Console

PIPE_WIDTH = 150
"""Width in columns where stdout is a pipe or a file, so that tables are not cut."""


def stdout_console() -> Console:
    """Return a console as wide as the terminal, or `PIPE_WIDTH` wide without one."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def page(text: str) -> None:
    """Print the text, through the user's pager (`PAGER`) where it is longer than the terminal is high."""
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        pydoc.pager(text)
    else:
        print(text)
