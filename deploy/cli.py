"""The command line. Commands import what they need when they run: `offbeat check` takes no torch and no vLLM."""

import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from common.config import Config
from common.environment import prepare_environment
from common.logs import configure_logs
from common.setting_checks import check, check_files
from common.settings import SettingError, explain, load, resolved_toml
from common.shutdown import ServiceError, StopRequest, die_with_parent
from deploy.quickstart import PLACEHOLDER, expand
from protocols.channels import ChannelError

logger = logging.getLogger(__name__)

QUICKSTART = Path(__file__).parent / "configs" / "quickstart.toml"
PARENT_VARIABLE = "OFFBEAT_PARENT"
"""Set by the launcher for its children: they die with the process of this id."""

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [SECTION.KEY=VALUE]...", help="A TOML file, and settings that replace its own."),
]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous, off-policy reinforcement learning for language models.",
    epilog="Every setting: offbeat check --explain",
)


@app.command()
def train(arguments: Arguments = None) -> None:
    """Run learner and actors on this machine, and write the report. Without arguments: the quick start."""
    configure_logs("train")
    from deploy.launcher import Launcher

    config = expand(_read(arguments, default=QUICKSTART))
    check_files(config)
    _check_reward(config)
    raise typer.Exit(Launcher(config, StopRequest().install()).run())


@app.command()
def learner(arguments: Arguments = None) -> None:
    """Run the learner alone; actors find it at `hub.address`, in any starting order."""
    configure_logs("learner")
    config = expand(_read(arguments))
    check_files(config)
    stop = StopRequest().install()
    prepare_environment()
    from learner.service import run_learner

    run_learner(config, stop)


@app.command()
def actor(arguments: Arguments = None) -> None:
    """Run one actor; it may be started and stopped at any time while the learner runs."""
    config = expand(_read(arguments))
    configure_logs(config.actor.name or "actor")
    stop = StopRequest().install()
    prepare_environment()
    from actor.service import run_actor

    run_actor(config, stop)


@app.command(name="check")
def check_config(
    arguments: Arguments = None,
    show_explanation: Annotated[bool, typer.Option("--explain", help="Describe every setting instead.")] = False,
) -> None:
    """Validate a config without starting anything, and print it resolved."""
    if show_explanation:
        typer.echo(explain())
        return
    configure_logs("check")
    config = _read(arguments, default=QUICKSTART)
    # The quick start's files are made when it is first run.
    if PLACEHOLDER not in config.model.path:
        check_files(config)
    _check_reward(config)
    typer.echo(resolved_toml(config))


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]) -> None:
    """Write RUN/report.html: one self-contained page about the run."""
    from deploy.report import write_report

    try:
        typer.echo(write_report(run))
    except FileNotFoundError as error:
        raise SettingError("RUN", str(run), str(error), "Name the folder of a run.") from error


def main() -> None:
    """Entry point: what the user can mend is one line on stderr and exit status 2, without a traceback."""
    # Local modules (rewards named by import path) are found as `python -m` would find them.
    sys.path.insert(0, "")
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None:
        die_with_parent(int(parent))
    try:
        app()
    except (SettingError, ChannelError) as error:
        _fail(error, 2)
    except ServiceError as error:
        _fail(error, 1)


def _fail(error: Exception, status: int) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(status)


def _read(arguments: list[str] | None, default: Path | None = None) -> Config:
    """The config of a command line, checked."""
    arguments = list(arguments or [])
    is_path_given = arguments and "=" not in arguments[0]
    path = Path(arguments.pop(0)) if is_path_given else default
    if path is None:
        raise SettingError("CONFIG", "", "no config file is given", "Name a TOML file, for example: offbeat learner run.toml")
    config = _fill_in_time(load(path, arguments))
    for warning in check(config):
        logger.warning(warning)
    return config


def _check_reward(config: Config) -> None:
    """Refuse a reward that cannot be imported before anything is started; on other machines the actor does it."""
    from actor.rewards import load_reward

    load_reward(config.task.reward)


def _fill_in_time(config: Config) -> Config:
    from msgspec.structs import replace

    folder = config.run.dir.replace("{time}", time.strftime("%Y%m%d-%H%M%S"))
    return replace(config, run=replace(config.run, dir=folder))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # A process that an engine spawned (tensor parallelism): it imports this module before anything else.
    prepare_environment()
