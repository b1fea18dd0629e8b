"""`offbeat train`: a whole run on this machine."""

import logging

import typer

from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import configure_logs
from offbeat.common.settings.loading import refuse_masked
from offbeat.deploy.checks.preflight import look
from offbeat.deploy.cli.arguments import QUICKSTART, Arguments, load_config, say_start
from offbeat.deploy.cli.beginning import settle_resume
from offbeat.deploy.local.devices.plan import plan_of_this_machine
from offbeat.deploy.local.forks import choose_starts
from offbeat.deploy.local.launcher import Launcher
from offbeat.deploy.local.quickstart.prepared import expand

logger = logging.getLogger(__name__)


def command(arguments: Arguments = None) -> None:
    """Run learner and actors on this machine, and write a report. Without arguments, run the quick start."""
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
