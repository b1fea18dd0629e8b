"""`offbeat check`: a config's mistakes, or the description of every setting."""

from typing import Annotated

import typer

from offbeat.common.records.logs import configure_logs
from offbeat.common.records.run_folder import decide_resume
from offbeat.common.settings.checks import check_before_run
from offbeat.common.settings.loading import resolved_toml
from offbeat.deploy.checks.preflight import look
from offbeat.deploy.cli import explain
from offbeat.deploy.cli.arguments import QUICKSTART, Arguments, load_config, say_start
from offbeat.deploy.local.quickstart.prepared import expand, is_made


def command(
    arguments: Arguments = None,
    show_explanation: Annotated[
        bool, typer.Option("--explain", help="Instead describe the named settings, or every setting.")
    ] = False,
) -> None:
    """Check a config for mistakes without starting anything, and print the resolved settings."""
    if show_explanation:
        explain.command(arguments)
        return
    configure_logs("check")
    say_start("check")
    config = load_config(arguments, default=QUICKSTART)
    decided = decide_resume(config)
    # Prepared tasks are made when they are first run.
    if not is_made(config):
        check_before_run(decided)
    else:
        for note in look(expand(decided), "check"):
            typer.echo(f"# {note}")
    typer.echo(resolved_toml(config))
