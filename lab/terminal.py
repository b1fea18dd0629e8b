"""The console that commands print their tables on."""

import sys

from rich.console import Console

PIPE_WIDTH = 150
"""Width in columns where stdout is a pipe or a file, so that tables are not cut."""


def stdout_console() -> Console:
    """Return a console as wide as the terminal, or `PIPE_WIDTH` wide without one."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
