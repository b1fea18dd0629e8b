"""`offbeat scale`: changes the number of actors of a running job."""

from typing import Annotated

import typer

from offbeat.common.processes.shutdown import USER_ERROR_STATUS
from offbeat.deploy.cli.arguments import Operator, read_config_of_run
from offbeat.deploy.operating.link import open_link_to
from offbeat.deploy.operating.set import tune


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or its TOML file.")],
    actors: Annotated[int, typer.Argument(metavar="ACTORS", help="Number of actors that the run should have.")],
    operator: Operator = "operator",
) -> None:
    """Change how many actors a run has: short for `offbeat set RUN scale.actors=N`.

    `offbeat train` or `offbeat reconcile` then starts actors, or asks the newest to leave.
    """
    config = read_config_of_run([run])
    is_changed = tune(open_link_to(config.hub, operator), config.hub.address, {"scale.actors": str(actors)})
    raise typer.Exit(0 if is_changed else USER_ERROR_STATUS)
