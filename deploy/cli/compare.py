"""`offbeat compare`: one page about several runs."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.lab.comparison.comparison_page import write_comparison


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="File to write the page to.")] = Path("comparison.html"),
) -> None:
    """Write one self-contained page that compares runs: their curves in one plot, and the settings that differ."""
    typer.echo(write_comparison(runs, out))
