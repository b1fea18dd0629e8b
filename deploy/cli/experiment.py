"""The commands that compare settings: by a simulation, by a recorded run, or by runs of their own."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from offbeat.common.errors import SettingError
from offbeat.common.records.logs import configure_logs
from offbeat.deploy.cli.arguments import (
    QUICKSTART,
    Arguments,
    RunFolder,
    ShardText,
    read_config,
    read_shard,
    split_arguments,
    split_list,
    split_numbers,
    start_time,
)


def simulate_command(
    arguments: Arguments = None,
    actors: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of actors. [default: launch.num_actors]")] = "",
    staleness: Annotated[
        str, typer.Option(metavar="N,N,...", help="Staleness bounds. [default: staleness.max_staleness]")
    ] = "",
    fitted: Annotated[
        list[Path] | None,
        typer.Option("--fit", metavar="RUN", help="Take durations from this run. Two runs that differ give a better fit."),
    ] = None,
    completion_s: Annotated[float | None, typer.Option(help="Without --fit: mean seconds of a completion.")] = None,
    sigma: Annotated[float, typer.Option(min=0, help="Without --fit: standard deviation of its logarithm.")] = 0.5,
    train_s: Annotated[float | None, typer.Option(help="Without --fit: seconds of an optimizer step.")] = None,
    sync_s: Annotated[
        float, typer.Option(min=0, help="Without --fit: seconds from a step to its weights at the actors.")
    ] = 0.0,
    cores: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="CPU cores that all services share; 0: each has its own. [default: this machine's, if --fit's run used CPUs]",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="Minutes to simulate. Ends earlier if train.num_steps are done.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random draws.")] = 0,
    scale: Annotated[
        Literal["none", "auto"],
        typer.Option(help="auto: scale.auto changes the number of actors, starting from the first of --actors."),
    ] = "none",
    start_s: Annotated[float, typer.Option(min=0, help="For --scale auto: seconds that an actor takes to start.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict throughput, idle time and staleness for other bounds and numbers of actors, without training.

    Runs the learner's own scheduler under a simulated clock. Without CONFIG, uses that of the first run of --fit.
    """
    from offbeat.common.records.run_folder import CONFIG_FILE
    from offbeat.common.settings.config import actors_wanted
    from offbeat.lab.simulation import predict

    runs = list(fitted or [])
    config = read_config(arguments, default=runs[0] / CONFIG_FILE if runs else None)
    if runs:
        source = predict.fitted_times(config, runs, cores)
    else:
        source = predict.given_times(config, completion_s, sigma=sigma, train_s=train_s, sync_s=sync_s, cores=cores)
    numbers = split_numbers("--actors", actors, at_least=1) or [actors_wanted(config)]
    if scale == "auto":
        run = predict.simulate_scaled(config, source, num_actors=numbers[0], start_s=start_s, seconds=60 * minutes, seed=seed)
        predict.print_scaled(run, source, as_json=as_json)
        return
    predictions = predict.simulate(
        config,
        source,
        actors=numbers,
        staleness=split_numbers("--staleness", staleness, at_least=0) or [config.staleness.max_staleness],
        seconds=60 * minutes,
        seed=seed,
    )
    predict.print_predictions(predictions, source, config, as_json=as_json)


def replay_command(
    run: RunFolder,
    staleness: Annotated[str, typer.Option(metavar="0,2,8", help="Bounds: values of staleness.max_staleness.")] = "",
    policy: Annotated[str, typer.Option(metavar="gate,drop,abort", help="Values of staleness.staleness_policy.")] = "",
    loss: Annotated[
        str, typer.Option(metavar="gspo,sapo,...", help="Compare the gradients of these objectives at the run's checkpoints.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Replay a run's rollout log with other staleness bounds or objectives, and say what that cannot tell.

    Exit status 1 if a replay with the recorded settings differs from the recording.
    """
    from offbeat.lab.replay import render_replay, replay_run
    from offbeat.lab.terminal import print_result

    configure_logs("replay")
    bounds = split_numbers("--staleness", staleness, at_least=0)
    report = replay_run(run, staleness=bounds, policies=split_list(policy), objectives=split_list(loss))
    print_result(report, render_replay(report), as_json=as_json)
    raise typer.Exit(1 if report.differences else 0)


def sweep_command(
    arguments: Arguments = None,
    varied: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V1,V2,...", help="Values to try. Repeat the option to try all combinations."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per value, with run.seed counting up.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the sweep. An existing sweep is continued. [default: runs/sweep-TIME]")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each on its share of the GPUs or cores.")] = 1,
    shard: ShardText = "",
    stop_hopeless: Annotated[
        bool, typer.Option("--stop-hopeless", help="Stop runs that become worse than the initial model.")
    ] = False,
    difference: Annotated[float, typer.Option(min=0, help="Loss of final reward that you accept.")] = 0.02,
    baseline: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Compare with this value at otherwise equal settings. [default: the reference]"),
    ] = None,
    as_commands: Annotated[bool, typer.Option("--print", help="Run nothing. Print the command of each run.")] = False,
    as_job: Annotated[bool, typer.Option("--slurm", help="Run nothing. Print a job array for sbatch.")] = False,
    only_report: Annotated[bool, typer.Option("--report", help="Run nothing. Write the report of --out.")] = False,
) -> None:
    """Run the quick start, or CONFIG, with several settings and seeds, and compare them in one report.

    Exit status 1 if a run failed. Repeat the command with --out to continue a sweep.
    """
    from offbeat.common.processes.shutdown import StopRequest
    from offbeat.common.settings.loading import load
    from offbeat.deploy.checks.preflight import look
    from offbeat.deploy.experiments.sweep_runs import places_here, render_commands, run_sweep
    from offbeat.deploy.experiments.trials import check_trials, make_trials, prepare, render_job_array
    from offbeat.deploy.local.quickstart.prepared import expand
    from offbeat.lab.sweep.plan import make_plan, read_baseline
    from offbeat.lab.sweep.sweep_report import write_sweep_report

    configure_logs("sweep")
    _check_parts(shard, jobs, out, as_job=as_job, only_report=only_report)
    if only_report and out:
        typer.echo(write_sweep_report(out, difference, baseline or ()))
        return
    path, overrides = split_arguments(arguments)
    path = path or QUICKSTART
    plan = make_plan(varied or [], num_seeds=seeds, first_seed=load(path, overrides).run.seed)
    read_baseline(plan, baseline or ())
    part, places = read_shard(shard), places_here(jobs)
    folder = out or Path(f"runs/sweep-{start_time()}")
    trials = make_trials(plan, path, overrides, folder)
    mine = part.of(trials)
    if not (as_commands or as_job):
        check_trials(mine, lambda config: look(expand(config), "train"), num_at_once=jobs)
    prepare(plan, trials, folder)
    if as_commands or as_job:
        again = _same_command(arguments, varied, seeds, folder, difference, baseline, stop_hopeless=stop_hopeless)
        typer.echo(render_job_array(trials, folder, again) if as_job else render_commands(mine, folder))
        return
    write = partial(write_sweep_report, folder, difference, baseline or ())
    status = run_sweep(mine, folder, StopRequest().install(), typer.echo, write, places=places, stops_hopeless=stop_hopeless)
    raise typer.Exit(status)


def _check_parts(shard: str, jobs: int, out: Path | None, *, as_job: bool, only_report: bool) -> None:
    """Raise `SettingError` for parts of a sweep that would not be of one sweep, or of an array that has its own."""
    if only_report and out is None:
        raise SettingError("--out", "", "--report needs the folder of a sweep", "Name it: --out FOLDER.")
    if shard and out is None:
        raise SettingError("--shard", shard, "all parts need the same folder", "Name it: --out FOLDER.")
    if as_job and (shard or jobs > 1):
        problem = "each task of the array is a shard with one run"
        raise SettingError("--slurm", shard or jobs, problem, "Leave out --shard and --jobs, or write the array yourself.")


def _same_command(
    arguments: list[str] | None,
    varied: list[str] | None,
    seeds: int,
    folder: Path,
    difference: float,
    baseline: list[str] | None,
    *,
    stop_hopeless: bool,
) -> list[str]:
    """Return the command line that makes the runs of the same sweep."""
    command = ["offbeat", "sweep", *(arguments or ())]
    for name, texts in (("--set", varied), ("--baseline", baseline)):
        command += [part for text in texts or () for part in (name, text)]
    command += ["--seeds", str(seeds), "--out", str(folder), "--difference", f"{difference:g}"]
    return command + (["--stop-hopeless"] if stop_hopeless else [])
