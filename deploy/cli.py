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
from common.shutdown import (
    GAVE_UP_STATUS,
    PARENT_VARIABLE,
    USER_ERROR_STATUS,
    ServiceError,
    StopRequest,
    die_with_parent,
)
from deploy.quickstart import PLACEHOLDER, expand
from protocols.channels import ChannelError

logger = logging.getLogger(__name__)

QUICKSTART = Path(__file__).parent / "configs" / "quickstart.toml"

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
    _check_functions(config)
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
    _check_functions(config)
    typer.echo(resolved_toml(config))


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]) -> None:
    """Write RUN/report.html: one self-contained page about the run."""
    from deploy.report import write_report

    try:
        typer.echo(write_report(run))
    except FileNotFoundError as error:
        raise SettingError("RUN", str(run), str(error), "Name the folder of a run.") from error


@app.command()
def status(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN [SECTION.KEY=VALUE]...", help="A run's folder or its TOML file, and settings."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Ask again every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    operator: Annotated[str, typer.Option(help="Whose key to use, where the run has keys.")] = "operator",
) -> None:
    """Ask a running learner how the run is: members, ledger, buffer, and what it waits for. It answers in mid-step too."""
    from common.hub_keys import keys_of_peer
    from deploy.status import show_status, watch_status
    from protocols.channels import Link

    arguments = list(arguments or [])
    if arguments and Path(arguments[0]).is_dir():
        arguments[0] = str(Path(arguments[0]) / "config.toml")
    hub = _read(arguments).hub
    keys = keys_of_peer(hub, operator, "operator")

    def open_link(identity: bytes) -> Link:
        limit = hub.max_message_mb << 20
        return Link(hub.address, identity=identity, max_message_bytes=limit, key=keys.key, learner_key=keys.learner_key)

    if watch:
        watch_status(open_link, hub.address, StopRequest().install())
    else:
        show_status(open_link, hub.address, as_json=as_json)


@app.command(name="audit")
def audit_run(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]) -> None:
    """Follow every lease of a run through its log, and say what must not have happened; exit status 1 if anything did."""
    from deploy.audit import audit, show

    config_file = run / "config.toml"
    if not config_file.exists():
        raise SettingError("RUN", str(run), "it has no config.toml", "Name the folder of a run.")
    raise typer.Exit(0 if show(audit(run, load(config_file))) else 1)


@app.command()
def chaos(
    arguments: Arguments = None,
    seed: Annotated[int, typer.Option(help="Decides which faults happen, and when.")] = 0,
    minutes: Annotated[float, typer.Option(help="A round that has begun by then is finished.")] = 2.0,
) -> None:
    """Run the quick start, or CONFIG, under faults: kills, stops, cuts, a corrupted log, a full disk; then audit what it left.

    Exit status 1 when anything is wrong. As root it makes a network namespace and a small disk for itself.
    """
    configure_logs("chaos")
    from deploy.chaos import run_chaos, show

    arguments = list(arguments or [])
    is_quickstart = not arguments or "=" in arguments[0]
    path = QUICKSTART if is_quickstart else Path(arguments.pop(0))
    folder = Path(f"runs/chaos-{time.strftime('%Y%m%d-%H%M%S')}")
    stop = StopRequest().install()
    report = run_chaos(path, arguments, is_quickstart=is_quickstart, seed=seed, minutes=minutes, folder=folder, stop=stop)
    show(report)
    logger.info("all that was found: %s", folder / "chaos.json")
    raise typer.Exit(130 if stop else 0 if report.is_good else 1)


@app.command()
def keygen(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the key files go.")],
    actors: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ACTOR]...", help="Names of actors; one that ends in * is for a fleet that shares a key."),
    ] = None,
    operators: Annotated[list[str] | None, typer.Option("--operator", metavar="NAME", help="One more operator.")] = None,
) -> None:
    """Make the keys by which the learner knows its actors, and they it: needed beyond one machine."""
    from deploy.keygen import instructions, make_keys

    typer.echo(instructions(folder, make_keys(folder, actors or [], operators or [])))


def main() -> None:
    """Entry point: what the user can mend is one line on stderr and exit status 2, without a traceback."""
    # Local modules (rewards named by import path) are found as `python -m` would find them.
    sys.path.insert(0, "")
    # Not for what this process starts.
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        die_with_parent(int(parent))
    try:
        app()
    except (SettingError, ChannelError) as error:
        _fail(error, USER_ERROR_STATUS)
    except ServiceError as error:
        _fail(error, GAVE_UP_STATUS)


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


def _check_functions(config: Config) -> None:
    """Refuse functions that cannot be imported before anything is started; on other machines actor and learner do it."""
    from actor.rewards import load_reward
    from learner.reward_shaping import load_length_penalty

    load_reward(config.task.reward)
    if config.reward.length_penalty:
        load_length_penalty(config.reward.length_penalty)


def _fill_in_time(config: Config) -> Config:
    from msgspec.structs import replace

    folder = config.run.dir.replace("{time}", time.strftime("%Y%m%d-%H%M%S"))
    return replace(config, run=replace(config.run, dir=folder))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # A process that an engine spawned (tensor parallelism): it imports this module before anything else.
    prepare_environment()
