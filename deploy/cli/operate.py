"""The commands that ask a running learner, or change its settings."""

from typing import Annotated

import typer

from offbeat.common.processes.shutdown import USER_ERROR_STATUS, StopRequest
from offbeat.common.records.run_folder import LAUNCH_FILE
from offbeat.deploy.cli.arguments import Operator, read_run
from offbeat.deploy.operating.link import ask_status, open_link_to
from offbeat.deploy.operating.set import refuse_large_changes, requested, say_who_follows, tune
from offbeat.deploy.operating.status import Asked, print_status, watch_status


def status_command(
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
    config, folder = read_run(arguments)
    asked = Asked(open_link_to(config.hub, operator), config.hub.address, folder, config.train.num_steps)
    if watch:
        watch_status(asked, StopRequest().install())
    else:
        print_status(asked, as_json=as_json)


def set_command(
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
    config, folder = read_run([run])
    open_link, address = open_link_to(config.hub, operator), config.hub.address
    status = ask_status(open_link, address, folder)
    if not yes:
        refuse_large_changes(status, config, wanted)
    raise typer.Exit(0 if tune(open_link, address, wanted) else USER_ERROR_STATUS)


def scale_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or its TOML file.")],
    actors: Annotated[int, typer.Argument(metavar="ACTORS", help="Number of actors that the run should have.")],
    operator: Operator = "operator",
) -> None:
    """Change how many actors a run has: short for `offbeat set RUN scale.actors=N`.

    `offbeat train` or `offbeat reconcile` then starts actors, or asks the newest to leave.
    """
    config, folder = read_run([run])
    open_link = open_link_to(config.hub, operator)
    status = ask_status(open_link, config.hub.address, folder)
    is_changed = tune(open_link, config.hub.address, {"scale.actors": str(actors)})
    # A run with this file has a launcher, which follows the number.
    if is_changed and not (folder / LAUNCH_FILE).exists():
        say_who_follows(len(status.members), actors)
    raise typer.Exit(0 if is_changed else USER_ERROR_STATUS)
