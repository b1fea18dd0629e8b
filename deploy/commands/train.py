"""`offbeat train`: a whole run on this machine."""

import logging

import typer

from offbeat.common.logs import configure_logs
from offbeat.common.settings import refuse_masked
from offbeat.common.shutdown import StopRequest
from offbeat.deploy.commands.arguments import QUICKSTART, Arguments, load_config, say_start
from offbeat.deploy.commands.beginning import settle_resume
from offbeat.deploy.devices.plan import plan_of_this_machine
from offbeat.deploy.launch.forks import choose_starts
from offbeat.deploy.launch.launcher import Launcher
from offbeat.deploy.preflight.preflight import look
from offbeat.deploy.quickstart.prepared import expand

logger = logging.getLogger(__name__)


def command(arguments: Arguments = None) -> None:
    """Run learner and actors on this machine, and write the report. Without arguments: the quick start."""
    configure_logs("train")
    say_start("train")
    config = settle_resume(expand(load_config(arguments, default=QUICKSTART)))
    refuse_masked(config)
    starts = choose_starts(config)
    starts.prepare()
    for note in look(config, "train"):
        logger.info("%s", note)
    plan, _ = plan_of_this_machine(config)
    raise typer.Exit(Launcher(config, StopRequest().install(), starts, plan=plan).run())
