"""`offbeat status`: a running learner's answer to how the run is."""

from typing import Annotated

import typer

from offbeat.common.shutdown import StopRequest
from offbeat.deploy.commands.arguments import Operator, read_config_of_run
from offbeat.deploy.live.link import open_link_to
from offbeat.deploy.live.status import print_status, watch_status


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN [SECTION.KEY=VALUE]...", help="A run's folder or its TOML file, and settings."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Ask again every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    operator: Operator = "operator",
) -> None:
    """Ask a running learner for its state: members, ledger, buffer, what it waits for. It answers during a step too."""
    hub = read_config_of_run(arguments).hub
    open_link = open_link_to(hub, operator)
    if watch:
        watch_status(open_link, hub.address, StopRequest().install())
    else:
        print_status(open_link, hub.address, as_json=as_json)
