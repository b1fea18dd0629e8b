"""`offbeat drift`: the effect of staleness on a run."""

from typing import Annotated

import typer

from offbeat.deploy.cli.arguments import RunFolder
from offbeat.lab.drift import print_drift


def command(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show how staleness affected a run: the drift at each policy lag, and any bias in the groups trained on."""
    print_drift(run, as_json=as_json)
