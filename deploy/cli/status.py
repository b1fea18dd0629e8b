"""`offbeat status`: the state of a run, or its end."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.processes.shutdown import StopRequest
from offbeat.deploy.cli.arguments import Operator, read_config_of_run
from offbeat.deploy.operating.link import open_link_to
from offbeat.deploy.operating.status import Asked, print_status, watch_status


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN [SECTION.KEY=VALUE]...", help="A run's folder or its TOML file, and settings."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every second, until Ctrl-C or the end of the run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON.")] = False,
    operator: Operator = "operator",
) -> None:
    """Show the state of a run: reward, lag, health, actors, ledger, and what it waits for or how it ended.

    A running learner answers at any time, even during a step. The end of a run is read from its folder.
    """
    config = read_config_of_run(arguments)
    given = Path(arguments[0]) if arguments else None
    folder = given if given is not None and given.is_dir() else Path(config.run.dir)
    asked = Asked(open_link_to(config.hub, operator), config.hub.address, folder, config.train.num_steps)
    if watch:
        watch_status(asked, StopRequest().install())
    else:
        print_status(asked, as_json=as_json)
