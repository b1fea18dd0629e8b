"""`offbeat sweep`: compares runs at several settings and seeds."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.logs import configure_logs
from offbeat.common.settings import SettingError, load
from offbeat.common.shutdown import StopRequest
from offbeat.deploy.commands.arguments import QUICKSTART, Arguments, split_arguments, start_time
from offbeat.deploy.preflight.preflight import look
from offbeat.deploy.quickstart.prepared import expand
from offbeat.deploy.sweep import check_cells, make_cells, prepare, render_commands, run_sweep
from offbeat.lab.sweep.plan import make_plan, read_plan
from offbeat.lab.sweep.sweep_report import write_sweep_report


def command(
    arguments: Arguments = None,
    varied: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=V1,V2,...", help="Values to try; repeat it for the product of several settings."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each value, with run.seed counting up.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="The sweep's folder; an existing sweep is continued. [default: runs/sweep-TIME]")
    ] = None,
    difference: Annotated[float, typer.Option(min=0, help="The loss of final reward that does not matter.")] = 0.02,
    as_commands: Annotated[bool, typer.Option("--print", help="Run nothing; print the command of each run.")] = False,
    as_job: Annotated[bool, typer.Option("--slurm", help="Run nothing; print a job array for sbatch.")] = False,
    only_report: Annotated[bool, typer.Option("--report", help="Run nothing; write the report of --out.")] = False,
) -> None:
    """Run the quick start, or CONFIG, at several settings and seeds, one after another; one report compares them.

    Exit status 1 when a run failed. The same command with --out continues a sweep that was stopped.
    """
    configure_logs("sweep")
    if only_report:
        if out is None:
            raise SettingError("--out", "", "--report needs the folder of a sweep", "Name it: --out FOLDER.")
        typer.echo(write_sweep_report(out, read_plan(out), difference))
        return
    path, overrides = split_arguments(arguments)
    path = path or QUICKSTART
    plan = make_plan(varied or [], num_seeds=seeds, first_seed=load(path, overrides).run.seed)
    folder = out or Path(f"runs/sweep-{start_time()}")
    cells = make_cells(plan, path, overrides, folder)
    if as_commands or as_job:
        prepare(plan, cells, folder)
        typer.echo(render_commands(cells, folder, as_job=as_job))
        return
    check_cells(cells, lambda config: look(expand(config), "train"))
    report = partial(write_sweep_report, folder, plan, difference)
    raise typer.Exit(run_sweep(plan, cells, folder, StopRequest().install(), say=typer.echo, write_report=report))
