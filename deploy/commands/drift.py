"""`offbeat drift`: what staleness did to a run."""

from typing import Annotated

import typer

from offbeat.deploy.commands.arguments import RunFolder
from offbeat.lab.drift import print_drift


def command(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show what staleness did to a run: the drift at each policy lag, and whether what was trained on is biased."""
    print_drift(run, as_json=as_json)
