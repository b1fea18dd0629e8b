"""`offbeat sweep`: compares runs at several settings and seeds."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.errors import SettingError
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import configure_logs
from offbeat.common.settings.loading import load
from offbeat.deploy.checks.preflight import look
from offbeat.deploy.cli.arguments import (
    QUICKSTART,
    Arguments,
    ShardText,
    read_shard,
    split_arguments,
    start_time,
)
from offbeat.deploy.local.quickstart.prepared import expand
from offbeat.deploy.sweep.cells import check_cells, make_cells, prepare, render_job_array
from offbeat.deploy.sweep.places import places_here
from offbeat.deploy.sweep.running import render_commands, run_sweep
from offbeat.lab.sweep.plan import make_plan, read_baseline
from offbeat.lab.sweep.sweep_report import write_sweep_report


def command(
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
    configure_logs("sweep")
    if only_report:
        if out is None:
            raise SettingError("--out", "", "--report needs the folder of a sweep", "Name it: --out FOLDER.")
        typer.echo(write_sweep_report(out, difference, baseline or ()))
        return
    _check_parts(shard, jobs, out, as_job=as_job)
    path, overrides = split_arguments(arguments)
    path = path or QUICKSTART
    plan = make_plan(varied or [], num_seeds=seeds, first_seed=load(path, overrides).run.seed)
    read_baseline(plan, baseline or ())
    part, places = read_shard(shard), places_here(jobs)
    folder = out or Path(f"runs/sweep-{start_time()}")
    cells = make_cells(plan, path, overrides, folder)
    if as_commands or as_job:
        prepare(plan, cells, folder)
        again = _command(arguments, varied, seeds, folder, difference, baseline, stop_hopeless=stop_hopeless)
        typer.echo(render_job_array(cells, folder, again) if as_job else render_commands(part.of(cells), folder))
        return
    check_cells(part.of(cells), lambda config: look(expand(config), "train"))
    prepare(plan, cells, folder)
    status = run_sweep(
        part.of(cells),
        folder,
        StopRequest().install(),
        say=typer.echo,
        write_report=partial(write_sweep_report, folder, difference, baseline or ()),
        places=places,
        stops_hopeless=stop_hopeless,
    )
    raise typer.Exit(status)


def _check_parts(shard: str, jobs: int, out: Path | None, *, as_job: bool) -> None:
    """Raise `SettingError` for parts of a sweep that would not be of one sweep, or of an array that has its own."""
    if shard and out is None:
        raise SettingError("--shard", shard, "all parts need the same folder", "Name it: --out FOLDER.")
    if as_job and (shard or jobs > 1):
        problem = "each task of the array is a shard with one run"
        raise SettingError("--slurm", shard or jobs, problem, "Leave out --shard and --jobs, or write the array yourself.")


def _command(
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
