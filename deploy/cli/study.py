"""`offbeat study`: compares training methods at exactly known staleness."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.errors import SettingError
from offbeat.common.processes.environment import prepare_environment
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import configure_logs
from offbeat.deploy.cli.arguments import QUICKSTART, ShardText, read_shard, split_list, split_numbers
from offbeat.lab.study.cells import (
    LAGS,
    NUM_SEEDS,
    OF_MIXTURES,
    ROWS_FILE,
    Cell,
    StudyRow,
    append_row,
    left_to_do,
    make_cells,
    methods,
    read_lines,
    read_rows,
)
from offbeat.lab.study.probe_rows import PROBE_FILE, ProbeRow


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the rows. An existing study is continued.")],
    tasks: Annotated[str, typer.Option(metavar="NAME,...", help="Tasks. [default: reversal, reversal_moe, progression]")] = "",
    chosen: Annotated[str, typer.Option("--methods", metavar="NAME,...", help="Methods. [default: all]")] = "",
    lags: Annotated[str, typer.Option(metavar="N,N,...", help="Lags in optimizer steps.")] = ",".join(map(str, LAGS)),
    noise: Annotated[str, typer.Option(metavar="X,X,...", help="Noise on the sampler's logits, in nats.")] = "0",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per combination.")] = NUM_SEEDS,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each on one core.")] = 1,
    shard: ShardText = "",
    plan: Annotated[bool, typer.Option(help="Run nothing. Print the remaining runs and their estimated CPU hours.")] = False,
    probe: Annotated[bool, typer.Option(help="Instead measure bias and variance of the methods' gradients.")] = False,
    page: Annotated[Path | None, typer.Option(help="Run nothing. Write the results into this page.")] = None,
) -> None:
    """Train tiny models with every method at exact lags, without services, and compare the methods seed by seed.

    Each run is one process: the learner's trainer on completions of the weights of exactly so many steps before. Every
    finished run is a row of FOLDER/rows.jsonl, and the same command continues an unfinished study. docs/study.md has the
    method and the results.
    """
    configure_logs("study")
    if page is not None:
        from offbeat.lab.study.page import write_page

        for file in write_page(read_rows(folder), read_lines(folder / PROBE_FILE, ProbeRow), page):
            typer.echo(file)
        return
    prepare_environment()
    # Imports torch.
    from offbeat.deploy.study.tasks import MAIN_TASKS, TASKS

    of_tasks = _known("--tasks", tasks, list(TASKS)) or list(MAIN_TASKS)
    of_methods = _known("--methods", chosen, list(methods())) or list(methods())
    of_lags = split_numbers("--lags", lags, at_least=0)
    if probe:
        _probe(folder, of_tasks, of_methods, of_lags, seeds)
        return
    every = make_cells(of_tasks, of_methods, of_lags, _noises(noise), seeds)
    cells = [cell for cell in every if TASKS[cell.task].recipe.moe or cell.method not in OF_MIXTURES]
    part = read_shard(shard)
    file = folder / (ROWS_FILE if part.number == 1 else f"rows-{part.place}-of-{part.number}.jsonl")
    _run(part.of(cells), folder, file, num_jobs=0 if plan else jobs)


def _run(cells: Sequence[Cell], folder: Path, file: Path, *, num_jobs: int) -> None:
    """Run the cells that have no row in the folder, with new rows in the file; only tell how many with no jobs."""
    from offbeat.deploy.study.matrix import make_config, run_cells
    from offbeat.deploy.study.tasks import TASKS

    settings = {cell: (*TASKS[cell.task].settings, *methods()[cell.method]) for cell in cells}
    rows = read_rows(folder)
    todo = left_to_do(cells, rows, settings)
    typer.echo(_plan_text(todo, rows))
    if num_jobs == 0:
        return
    for task in dict.fromkeys(cell.task for cell in todo):
        TASKS[task].make()
    for cell in todo:
        make_config(QUICKSTART, cell, settings[cell], TASKS[cell.task].model_path)
    stop = StopRequest().install()
    run_cells(QUICKSTART, todo, settings, file, stop, num_jobs=num_jobs, say=typer.echo)
    if stop:
        raise typer.Exit(130)


def _probe(folder: Path, tasks: Sequence[str], chosen: Sequence[str], lags: Sequence[int], num_seeds: int) -> None:
    """Measure the gradients of those of the methods that have no row yet, one staleness after another."""
    from offbeat.deploy.study.matrix import probe_lag
    from offbeat.deploy.study.tasks import TASKS

    file = folder / PROBE_FILE
    done = {(row.task, row.lag, row.seed, row.method) for row in read_lines(file, ProbeRow)}
    for seed, task, lag in itertools.product(range(num_seeds), tasks, lags):
        fitting = [method for method in chosen if TASKS[task].recipe.moe or method not in OF_MIXTURES]
        left = {method: methods()[method] for method in fitting if (task, lag, seed, method) not in done}
        if not left:
            continue
        TASKS[task].make()
        for row in probe_lag(QUICKSTART, task, lag, seed, left):
            append_row(file, row)
        typer.echo(f"{task}, lag {lag}, seed {seed}: {len(left)} methods")


def _known(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names in a list; raise `SettingError` for one that is not known."""
    names = split_list(text)
    for name in names:
        if name not in known:
            raise SettingError(option, name, "there is none of this name", f"Take from {', '.join(known)}.")
    return names


def _noises(text: str) -> list[float]:
    try:
        noises = [float(part) for part in split_list(text)]
    except ValueError as error:
        raise SettingError("--noise", text, "these are not all numbers", "Write for example --noise 0,0.05.") from error
    if not noises or not all(0 <= noise < 10 for noise in noises):
        raise SettingError("--noise", text, "noise is at least 0 and below 10 nats", "Write for example --noise 0,0.05.")
    return noises


def _plan_text(todo: Sequence[Cell], rows: Sequence[StudyRow]) -> str:
    """Return the number of runs left, and the CPU hours that those of the same task and lag have taken."""
    hours = 0.0
    unknown = 0
    for cell in todo:
        of_task = [row for row in rows if row.task == cell.task]
        nearest = min((abs(row.lag - cell.lag) for row in of_task), default=0)
        alike = [row.cpu_s for row in of_task if abs(row.lag - cell.lag) == nearest]
        hours += statistics.fmean(alike) / 3600 if alike else 0.0
        unknown += not alike
    told = f"{len(todo)} runs are to be done"
    if unknown < len(todo):
        told += f"; about {hours:.1f} CPU hours by the rows there"
    return told + (f", without {unknown} runs of tasks that have none" if 0 < unknown < len(todo) else "")
