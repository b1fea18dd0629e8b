"""`offbeat train`: a whole run on this machine."""

import typer

from offbeat.common.logs import configure_logs
from offbeat.common.setting_checks import check_files
from offbeat.common.shutdown import StopRequest
from offbeat.deploy.commands.arguments import QUICKSTART, Arguments, read_config
from offbeat.deploy.commands.user_functions import check_functions
from offbeat.deploy.launch.launcher import Launcher
from offbeat.deploy.quickstart.quickstart import expand


def command(arguments: Arguments = None) -> None:
    """Run learner and actors on this machine, and write the report. Without arguments: the quick start."""
    configure_logs("train")
    config = expand(read_config(arguments, default=QUICKSTART))
    check_files(config)
    check_functions(config)
    raise typer.Exit(Launcher(config, StopRequest().install()).run())
