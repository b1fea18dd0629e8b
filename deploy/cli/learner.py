"""`offbeat learner`: the learner service alone."""

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import typer

from offbeat.common.errors import SettingError
from offbeat.common.processes.environment import fast_imports, launcher_rank, prepare_environment
from offbeat.common.processes.shutdown import LAUNCHED_VARIABLE, PAUSED_STATUS, StopRequest
from offbeat.common.records.logs import configure_logs, doing
from offbeat.common.records.run_folder import locked
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import refuse_masked
from offbeat.deploy.checks.preflight import look
from offbeat.deploy.cli.arguments import Arguments, Preflight, load_config, say_start
from offbeat.deploy.cli.beginning import settle_resume
from offbeat.deploy.local.ending import end_run, go_on
from offbeat.deploy.local.quickstart.prepared import expand
from offbeat.protocols.addresses import ChannelError

logger = logging.getLogger(__name__)

REPORT_COMMAND = (sys.executable, "-m", "offbeat.lab.report.run_report")
"""Prints the report of a run, in whose folder the learner's live page has it made."""


def command(arguments: Arguments = None, preflight: Preflight = True) -> None:
    """Run the learner alone. Start actors before or after it; they find it at `hub.address`. Writes the report at the end."""
    configure_logs("learner")
    say_start("learner")
    config = settle_resume(expand(load_config(arguments)))
    refuse_masked(config)
    is_first_rank = launcher_rank() == 0
    # Beside rank 0 the others would find its ports taken.
    if preflight and is_first_rank:
        look(config, "learner")
    # Held until the report is written. The other ranks write only what rank 0 tells them to.
    with locked(Path(config.run.dir)) if is_first_rank else nullcontext():
        _run(config, is_first_rank=is_first_rank)


def import_service(_: str) -> None:
    """Import what a learner needs, for a process that forks learners; the actors' engine does not matter."""
    import offbeat.learner.wiring  # noqa: F401


def _run(config: Config, *, is_first_rank: bool) -> None:
    """Run the learner in its folder, and write the report unless a launcher does."""
    stop = StopRequest().install()
    folder = Path(config.run.dir)
    is_launched = LAUNCHED_VARIABLE in os.environ
    # Imported last: torch takes seconds, reads the prepared environment, and a mistake in the config is reported before.
    words = "ended while the learner was starting" if is_launched else go_on(folder, "learner")
    with stop.at_once(words), doing(logger, "importing torch and DeepSpeed"), fast_imports():
        prepare_environment()
        from offbeat.learner.wiring import run_learner

    has_ended = True
    try:
        has_ended = run_learner(config, stop, REPORT_COMMAND) != "paused"
    except (SettingError, ChannelError):
        has_ended = False
        raise
    finally:
        if has_ended and not is_launched and is_first_rank:
            end_run(folder, "learner", stop)
    if not has_ended:
        logger.info("paused; %s", go_on(folder, "learner"))
        raise typer.Exit(PAUSED_STATUS)
