"""The commands that run a config: a whole run on this machine, or one of its services."""

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from offbeat.actor.joining import RunToJoin, joined
from offbeat.common.errors import SettingError
from offbeat.common.formats import to_toml
from offbeat.common.processes.environment import fast_imports, launcher_rank, prepare_environment, use_every_core
from offbeat.common.processes.shutdown import LAUNCHED_VARIABLE, PAUSED_STATUS, StopRequest
from offbeat.common.records.logs import PrintedText, configure_logs, doing
from offbeat.common.records.run_folder import decide_resume, holds_work, locked, naming_disk_errors
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import refuse_masked
from offbeat.deploy.checks.preflight import look
from offbeat.deploy.cli.arguments import (
    QUICKSTART,
    SMOLLM2,
    Arguments,
    Preflight,
    begin_log,
    load_config,
    split_arguments,
    start_time,
)
from offbeat.deploy.local.ending import end_run, go_on
from offbeat.deploy.local.forks import choose_starts
from offbeat.deploy.local.launcher import Launcher
from offbeat.deploy.local.plan import plan_of_this_machine
from offbeat.deploy.local.quickstart.prepared import expand
from offbeat.deploy.local.starts import PROGRAM
from offbeat.protocols.addresses import ChannelError

logger = logging.getLogger(__name__)

REPORT_COMMAND = (sys.executable, "-m", "offbeat.lab.report.run_report")
"""Prints the report of a run, in whose folder the learner's live page has it made."""
LEAVES = "the actor leaves before it has joined"
Join = Annotated[
    str, typer.Option(metavar="ADDRESS", help="The learner's tcp://HOST:PORT. The actor gets settings and model from it.")
]
Key = Annotated[str, typer.Option(metavar="FILE", help="With --join: this actor's secret key.")]
LearnerKey = Annotated[str, typer.Option(metavar="FILE", help="With --join: the learner's public key.")]


def train_command(arguments: Arguments = None) -> None:
    """Run learner and actors on this machine, and write a report. Without arguments, run the quick start."""
    begin_log("train")
    config = settle_resume(expand(load_config(arguments, default=QUICKSTART)))
    refuse_masked(config)
    starts = choose_starts(config)
    starts.prepare()
    for note in look(config, "train"):
        logger.info("%s", note)
    plan, _ = plan_of_this_machine(config)
    with naming_disk_errors(Path(config.run.dir)):
        status = Launcher(config, StopRequest().install(), starts, plan=plan).run()
    raise typer.Exit(status)


def demo_command(
    arguments: Arguments = None,
    small: Annotated[bool, typer.Option("--small", help="Use the quick start's tiny model, which takes a minute.")] = False,
    browser: Annotated[bool, typer.Option(help="Open the live page where there is a browser.")] = True,
) -> None:
    """Show what a run survives: an actor and the learner are killed, the staleness bound is changed, an actor is added.

    Without CONFIG, an adapter of SmolLM2-135M learns sums. At the end you get the report, the sums of the ledger, and the
    audit of every lease. Ctrl-C ends the run with all its processes.
    """
    from offbeat.deploy.local.demo import CHECKPOINT_INTERVAL, run_demo

    begin_log("demo")
    path, overrides = split_arguments(arguments)
    own = [f"train.checkpoint_interval={CHECKPOINT_INTERVAL}", f'run.dir="runs/demo-{start_time()}"']
    command = [str(path or (QUICKSTART if small else SMOLLM2)), *own, *overrides]
    config = expand(load_config(command))
    refuse_masked(config)
    # The run would otherwise replace `{time}` by a time of its own.
    command.append(f"run.dir={to_toml(config.run.dir)}")
    raise typer.Exit(run_demo(config, [*PROGRAM, "train", *command], typer.echo, opens_browser=browser))


def learner_command(arguments: Arguments = None, preflight: Preflight = True) -> None:
    """Run the learner alone. Start actors before or after it; they find it at `hub.address`. Writes the report at the end."""
    begin_log("learner")
    config = expand(load_config(arguments))
    is_first_rank = launcher_rank() == 0
    # The others do not use `run.resume`, and would find the folder locked by rank 0 while it fetches the run.
    if is_first_rank:
        config = settle_resume(config)
    refuse_masked(config)
    # Beside rank 0 the others would find its ports taken.
    if preflight and is_first_rank:
        look(config, "learner")
    # Held until the report is written. The other ranks write only what rank 0 tells them to.
    folder = Path(config.run.dir)
    with naming_disk_errors(folder), locked(folder) if is_first_rank else contextlib.nullcontext():
        _run_learner(config, is_first_rank=is_first_rank)


def _run_learner(config: Config, *, is_first_rank: bool) -> None:
    """Run the learner in its folder, and write the report unless a launcher does."""
    stop = StopRequest().install()
    folder = Path(config.run.dir)
    is_launched = LAUNCHED_VARIABLE in os.environ
    # Imported last: torch takes seconds, reads the prepared environment, and a mistake in the config is reported before.
    words = "ended while the learner was starting" if is_launched else go_on(folder, "learner")
    with stop.at_once(words), doing(logger, "importing torch and DeepSpeed"), fast_imports():
        prepare_environment()
        from offbeat.learner.wiring import run_learner

        use_every_core(config.model.path, config.launch.learner_processes)
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


def actor_command(
    arguments: Arguments = None, preflight: Preflight = True, join: Join = "", key: Key = "", learner_key: LearnerKey = ""
) -> None:
    """Run one actor. You may start and stop actors at any time while the learner runs."""
    begin_log("actor")
    stop = StopRequest().install()
    with contextlib.ExitStack() as stack:
        with stop.at_once(LEAVES):
            run = _run_to_join(arguments, join, key, learner_key)
            config = expand(load_config(arguments)) if run is None else stack.enter_context(joined(run, arguments or []))
            refuse_masked(config)
            if config.actor.name:
                configure_logs(config.actor.name)
            if preflight:
                look(config, "actor" if run is None else "join")
        # Imported last: the engine takes seconds, reads the prepared environment, and a mistake in the config shows before.
        with stop.at_once(LEAVES), doing(logger, "importing the engine"), fast_imports():
            prepare_environment()
            from offbeat.actor.service import run_actor

        # Rewards that are not plain functions run in this process.
        sys.stdout = PrintedText(sys.stdout)
        run_actor(config, stop)


def _run_to_join(arguments: list[str] | None, join: str, key: str, learner_key: str) -> RunToJoin | None:
    """Return the run to join, None without --join; raise `SettingError` for arguments that do not go with it."""
    if join:
        path, _ = split_arguments(arguments)
        if path is not None:
            raise SettingError("CONFIG", str(path), "with --join the settings come from the learner", "Leave the file out.")
        return RunToJoin(join, key, learner_key)
    if key or learner_key:
        option = "--key" if key else "--learner-key"
        raise SettingError(option, key or learner_key, "it belongs to --join", "Set hub.key and hub.learner_key instead.")
    return None


def import_service(command: str, engine: Literal["auto", "vllm", "transformers"]) -> None:
    """Import what the service of a command needs, an actor with its engine, for a process that forks services."""
    if command == "learner":
        import offbeat.learner.wiring
    else:
        import offbeat.actor.service  # noqa: F401
        from offbeat.actor.engines.choice import engine_class

        engine_class(engine)


def settle_resume(config: Config) -> Config:
    """Return the config with `run.resume` decided, after fetching a run from its mirror where the folder holds none."""
    folder = Path(config.run.dir)
    if config.run.mirror and config.run.resume and not holds_work(folder):
        from offbeat.learner.restart.mirror import fetch_run

        with locked(folder):
            fetch_run(folder, config.run.mirror)
    return decide_resume(config)
