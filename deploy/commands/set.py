"""`offbeat set`: settings of a running job, changed."""

from typing import Annotated

import typer

from offbeat.common.shutdown import USER_ERROR_STATUS
from offbeat.deploy.commands.arguments import Operator, read_config_of_run
from offbeat.deploy.live.link import open_link_to
from offbeat.deploy.live.set import requested, tune


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or its TOML file.")],
    settings: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="Settings, by their own name or as section.key.")
    ],
    operator: Operator = "operator",
) -> None:
    """Change settings of a running job, all of them or none: staleness.*, group concurrency, clip band, learning rate.

    The changes are recorded with your name and survive a restart. Exit status 2 when the learner refuses.
    """
    wanted = requested(settings)
    hub = read_config_of_run([run]).hub
    raise typer.Exit(0 if tune(open_link_to(hub, operator), hub.address, wanted) else USER_ERROR_STATUS)
