"""The command line. Commands import what they need when they run: `offbeat check` takes no torch and no vLLM."""

import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.config import Config
from offbeat.common.environment import fast_imports, prepare_environment
from offbeat.common.logs import configure_logs
from offbeat.common.setting_checks import check, check_files
from offbeat.common.settings import SettingError, explain, load, resolved_toml
from offbeat.common.shutdown import (
    GAVE_UP_STATUS,
    PARENT_VARIABLE,
    USER_ERROR_STATUS,
    ServiceError,
    StopRequest,
    die_with_parent,
)
from offbeat.deploy.quickstart.quickstart import PLACEHOLDER, expand
from offbeat.protocols.addresses import ChannelError

logger = logging.getLogger(__name__)

QUICKSTART = Path(__file__).parent / "quickstart" / "quickstart.toml"

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
    from offbeat.deploy.launch.launcher import Launcher

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
    with fast_imports():
        prepare_environment()
        from offbeat.learner.wiring import run_learner

    run_learner(config, stop)


@app.command()
def actor(arguments: Arguments = None) -> None:
    """Run one actor; it may be started and stopped at any time while the learner runs."""
    config = expand(_read(arguments))
    configure_logs(config.actor.name or "actor")
    stop = StopRequest().install()
    with fast_imports():
        prepare_environment()
        from offbeat.actor.service import run_actor

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
    from offbeat.lab.report.run_report import write_report

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
    from offbeat.deploy.live.link import open_link_to
    from offbeat.deploy.live.status import show_status, watch_status

    hub = _read(_in_folder(arguments)).hub
    open_link = open_link_to(hub, operator)
    if watch:
        watch_status(open_link, hub.address, StopRequest().install())
    else:
        show_status(open_link, hub.address, as_json=as_json)


@app.command(name="audit")
def audit_run(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]) -> None:
    """Follow every lease of a run through its log, and say what must not have happened; exit status 1 if anything did."""
    from offbeat.lab.audit import audit, show

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
    from offbeat.deploy.chaos.chaos import run_chaos, show

    path, overrides = _split(arguments)
    is_quickstart, path = path is None, path or QUICKSTART
    folder = Path(f"runs/chaos-{time.strftime('%Y%m%d-%H%M%S')}")
    stop = StopRequest().install()
    report = run_chaos(path, overrides, is_quickstart=is_quickstart, seed=seed, minutes=minutes, folder=folder, stop=stop)
    show(report)
    logger.info("all that was found: %s", folder / "chaos.json")
    raise typer.Exit(130 if stop else 0 if report.is_good else 1)


@app.command()
def calibrate(
    arguments: Arguments = None,
    groups: Annotated[int, typer.Option(min=2, help="Groups to sample.")] = 128,
    out: Annotated[Path | None, typer.Option(help="Where it goes. [default: runs/calibrate-TIME]")] = None,
    reuse: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Sample nothing: score what this run sampled under its initial weights.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the calibration as JSON.")] = False,
) -> None:
    """Measure the noise between this config's engine and learner at lag 0, and recommend a clip band above it."""
    configure_logs("calibrate")
    prepare_environment()
    from msgspec.structs import replace

    from offbeat.deploy.calibrate import calibrate, collect, show

    config = expand(_read(arguments, default=QUICKSTART))
    folder = out or Path(f"runs/calibrate-{time.strftime('%Y%m%d-%H%M%S')}")
    config = replace(config, run=replace(config.run, dir=str(folder), resume=False))
    check_files(config)
    _check_functions(config)
    if reuse is None:
        status = collect(config, groups, StopRequest().install())
        if status:
            raise typer.Exit(status)
    show(calibrate(config, reuse or folder), folder, as_json=as_json)


@app.command()
def drift(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show what staleness did to a run: the drift at each policy lag, and whether what was trained on is biased."""
    from offbeat.lab.drift import show_drift

    show_drift(run, as_json=as_json)


@app.command()
def sweep(
    arguments: Arguments = None,
    varied: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=V1,V2,...", help="Values to try; again for their product.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each value, with run.seed counting up.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="The sweep's folder; one that is there is gone on with. [default: runs/sweep-TIME]")
    ] = None,
    difference: Annotated[float, typer.Option(min=0, help="The loss of final reward that does not matter.")] = 0.02,
    as_commands: Annotated[bool, typer.Option("--print", help="Run nothing; print the command of each run.")] = False,
    as_job: Annotated[bool, typer.Option("--slurm", help="Run nothing; print a job array for sbatch.")] = False,
    only_report: Annotated[bool, typer.Option("--report", help="Run nothing; write the report of --out.")] = False,
) -> None:
    """Run the quick start, or CONFIG, at several settings and seeds, one after another; one report compares them.

    Exit status 1 when a run failed. What stopped goes on with the same command and --out.
    """
    configure_logs("sweep")
    from offbeat.deploy.sweep import alone_in, check_cells, make_cells, prepare, run_cells, show_commands
    from offbeat.lab.sweep.plan import make_plan, read_plan
    from offbeat.lab.sweep.sweep_report import write_sweep_report

    if only_report:
        if out is None:
            raise SettingError("--out", "", "it is not known which sweep", "Name its folder: --out FOLDER.")
        typer.echo(write_sweep_report(out, read_plan(out), difference))
        return
    path, overrides = _split(arguments)
    path = path or QUICKSTART
    plan = make_plan(varied or [], num_seeds=seeds, first_seed=load(path, overrides).run.seed)
    folder = out or Path(f"runs/sweep-{time.strftime('%Y%m%d-%H%M%S')}")
    cells = make_cells(plan, path, overrides, folder)
    if as_commands or as_job:
        prepare(plan, cells, folder)
        typer.echo(show_commands(cells, folder, as_job=as_job))
        return
    check_cells(cells, lambda config: check_files(expand(config)))
    check_cells(cells, _check_functions)
    with alone_in(folder):
        prepare(plan, cells, folder)
        status = run_cells(
            cells, StopRequest().install(), say=typer.echo, after_each=lambda: write_sweep_report(folder, plan, difference)
        )
        logger.info("report: %s", write_sweep_report(folder, plan, difference))
    if status:
        logger.info("the same command goes on with what is not finished, with --out %s", folder)
    raise typer.Exit(status)


@app.command(name="set")
def set_live(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or its TOML file.")],
    settings: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="Settings, by their own name or as section.key.")
    ],
    operator: Annotated[str, typer.Option(help="Whose key to use, where the run has keys.")] = "operator",
) -> None:
    """Change settings of a running job, all of them or none: staleness.*, group concurrency, clip band, learning rate.

    They are recorded with your name, and hold after a restart too. Exit status 2 when the learner refuses.
    """
    from offbeat.deploy.live.link import open_link_to
    from offbeat.deploy.live.set import requested, tune

    wanted = requested(settings)
    hub = _read(_in_folder([run])).hub
    raise typer.Exit(0 if tune(open_link_to(hub, operator), hub.address, wanted) else USER_ERROR_STATUS)


@app.command(name="simulate")
def simulate_run(
    arguments: Arguments = None,
    actors: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of actors; else launch.num_actors.")] = "",
    staleness: Annotated[str, typer.Option(metavar="N,N,...", help="Bounds; else staleness.max_staleness.")] = "",
    fitted: Annotated[
        list[Path] | None, typer.Option("--fit", metavar="RUN", help="Take the times from this run; two unlike ones tell more.")
    ] = None,
    completion_s: Annotated[float | None, typer.Option(help="Without --fit: mean seconds of a completion.")] = None,
    sigma: Annotated[float, typer.Option(help="Without --fit: standard deviation of its logarithm.")] = 0.5,
    train_s: Annotated[float | None, typer.Option(help="Without --fit: seconds of an optimizer step.")] = None,
    sync_s: Annotated[float, typer.Option(help="Without --fit: seconds from a step to its weights at the actors.")] = 0.0,
    cores: Annotated[
        int | None,
        typer.Option(help="That all services share; 0: each has its own. Else this machine's if the run of --fit was on CPUs."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Simulated time, unless train.num_steps are done before.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Decides what is drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict throughput, idle time and staleness for numbers of actors and bounds, without computing anything.

    The learner's own staleness policy runs under a simulated clock. Without CONFIG: that of the first run of --fit.
    """
    from offbeat.lab.simulation.predict import Given, fitted_times, given_times, numbers, show, simulate

    runs = list(fitted or [])
    config = _read(arguments, default=runs[0] / "config.toml" if runs else None)
    given = Given(completion_s, sigma, train_s, sync_s)
    source = fitted_times(config, runs, cores) if runs else given_times(config, given, cores)
    predictions = simulate(
        config,
        source,
        actors=numbers("--actors", actors or str(config.launch.num_actors), at_least=1),
        staleness=numbers("--staleness", staleness or str(config.staleness.max_staleness), at_least=0),
        seconds=60 * minutes,
        seed=seed,
    )
    show(predictions, source, config, as_json=as_json)


@app.command(name="replay")
def replay_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    staleness: Annotated[str, typer.Option(metavar="0,2,8", help="Bounds: values of staleness.max_staleness.")] = "",
    policy: Annotated[str, typer.Option(metavar="gate,drop,abort", help="Of staleness.staleness_policy.")] = "",
    selection: Annotated[str, typer.Option(metavar="oldest_lease,first_finished", help="Of staleness.selection.")] = "",
    loss: Annotated[
        str, typer.Option(metavar="gspo,sapo,...", help="Objectives whose gradients to compare at the run's checkpoints.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Feed a run's rollout log through other bounds, orders and objectives, and say what that cannot tell.

    Exit status 1 when the recorded settings do not give what was recorded.
    """
    configure_logs("replay")
    from offbeat.lab.replay.replay import Request, replay_run, show

    lists = [tuple(filter(None, text.replace(" ", "").split(","))) for text in (staleness, policy, selection, loss)]
    if not all(bound.isdecimal() for bound in lists[0]):
        raise SettingError("--staleness", staleness, "these are not all numbers", "Write for example --staleness 0,2,8.")
    report = replay_run(run, Request(tuple(map(int, lists[0])), *lists[1:]))
    show(report, as_json=as_json)
    raise typer.Exit(1 if report.differences else 0)


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
    from offbeat.deploy.launch.keygen import instructions, make_keys

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
    path, overrides = _split(arguments)
    path = path or default
    if path is None:
        raise SettingError("CONFIG", "", "no config file is given", "Name a TOML file, for example: offbeat learner run.toml")
    config = _fill_in_time(load(path, overrides))
    for warning in check(config):
        logger.warning(warning)
    return config


def _in_folder(arguments: list[str] | None) -> list[str]:
    """A command line whose first argument may be a run's folder instead of the config in it."""
    arguments = list(arguments or [])
    if arguments and Path(arguments[0]).is_dir():
        arguments[0] = str(Path(arguments[0]) / "config.toml")
    return arguments


def _split(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """The config file that a command line begins with, None where it does not, and the settings that follow."""
    arguments = list(arguments or [])
    # A path may hold one too: the folders of a sweep's runs do.
    if arguments and ("=" not in arguments[0] or Path(arguments[0]).is_file()):
        return Path(arguments[0]), arguments[1:]
    return None, arguments


def _check_functions(config: Config) -> None:
    """Refuse functions that cannot be imported before anything is started; on other machines actor and learner do it."""
    from offbeat.actor.rewards import load_reward
    from offbeat.learner.objectives.reward_shaping import load_length_penalty

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
    # Spawned, by an engine (tensor parallelism) or for rewards: it imports this module before anything else.
    prepare_environment()
