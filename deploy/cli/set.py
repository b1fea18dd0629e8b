"""`offbeat set`: changes settings of a running job."""

from typing import Annotated

import typer

from offbeat.common.processes.shutdown import USER_ERROR_STATUS
from offbeat.deploy.cli.arguments import Operator, read_config_of_run
from offbeat.deploy.operating.link import open_link_to
from offbeat.deploy.operating.set import refuse_large_changes, requested, tune


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or its TOML file.")],
    settings: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Settings, as key or section.key.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation if a value changes by 10x or more.")] = False,
    operator: Operator = "operator",
) -> None:
    """Change settings of a running job: staleness.*, group concurrency, clip range, learning rate, canary.

    All of the changes take effect, or none. They are recorded with your name and survive a restart. Exit status 2 if the
    learner refuses. If a value changes by 10x or more, the command asks for confirmation; without a terminal it needs --yes.
    """
    wanted = requested(settings)
    config = read_config_of_run([run])
    open_link, address = open_link_to(config.hub, operator), config.hub.address
    if not yes:
        refuse_large_changes(open_link, address, config, wanted)
    raise typer.Exit(0 if tune(open_link, address, wanted) else USER_ERROR_STATUS)
