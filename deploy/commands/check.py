"""`offbeat check`: a config's mistakes, or the description of every setting."""

from typing import Annotated

import typer

from offbeat.common.logs import configure_logs
from offbeat.common.setting_checks import check_files
from offbeat.common.settings import explain, resolved_toml
from offbeat.deploy.commands.arguments import QUICKSTART, Arguments, read_config
from offbeat.deploy.commands.user_functions import check_functions
from offbeat.deploy.quickstart.quickstart import PLACEHOLDER


def command(
    arguments: Arguments = None,
    show_explanation: Annotated[bool, typer.Option("--explain", help="Describe every setting instead.")] = False,
) -> None:
    """Validate a config without starting anything, and print it resolved."""
    if show_explanation:
        typer.echo(explain())
        return
    configure_logs("check")
    config = read_config(arguments, default=QUICKSTART)
    # The quick start's files are made when it is first run.
    if PLACEHOLDER not in config.model.path:
        check_files(config)
    check_functions(config)
    typer.echo(resolved_toml(config))
