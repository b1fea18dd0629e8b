"""The console that commands print their tables on."""

import sys

from rich.console import Console

PIPE_WIDTH = 150
"""Columns of text where stdout is no terminal: tables go into a pipe or a file whole."""


def stdout_console() -> Console:
    """As wide as the terminal, or `PIPE_WIDTH`."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
