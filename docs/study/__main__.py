"""Trains tiny models with every method at exact lags, without services, and compares the methods seed by seed.

    python -m docs.study docs/study --plan                    the remaining runs
    python -m docs.study docs/study --jobs 2                  run them
    python -m docs.study docs/study --page docs/study.md      write the page's tables and pictures

Run it in the repository's folder. docs/study.md has the method and the results.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from docs.study.trials import (
    LAGS,
    NUM_SEEDS,
    OF_MIXTURES,
    PROBE_FILE,
    ROWS_FILE,
    ProbeRow,
    make_trials,
    methods,
    read_lines,
    read_rows,
)
from offbeat.common.errors import SettingError
from offbeat.common.processes.environment import prepare_environment
from offbeat.common.processes.shutdown import INTERRUPTED_STATUS, StopRequest
from offbeat.common.records.logs import configure_logs
from offbeat.deploy.cli.arguments import ShardText, read_shard, split_list, split_numbers
from offbeat.deploy.cli.main import run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def study(
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

    Each run is one process: the learner's trainer, on completions from weights that are exactly that many steps old. Every
    finished run is a row of FOLDER/rows.jsonl, and the same command continues an unfinished study. docs/study.md has the
    method and the results.
    """
    configure_logs("study")
    if probe:
        _check_probe(noise, jobs, shard, plan=plan)
    if page is not None:
        from docs.study.page import write_page

        for file in write_page(read_rows(folder), read_lines(folder / PROBE_FILE, ProbeRow), page):
            typer.echo(file)
        return
    prepare_environment()
    # Imports torch.
    from docs.study.runs import run_probes, run_study
    from docs.study.tasks import MAIN_TASKS, TASKS

    of_tasks = _known("--tasks", tasks, list(TASKS)) or list(MAIN_TASKS)
    of_methods = _known("--methods", chosen, list(methods())) or list(methods())
    of_lags = split_numbers("--lags", lags, at_least=0)
    if probe:
        run_probes(folder, of_tasks, of_methods, of_lags, num_seeds=seeds, say=typer.echo)
        return
    every = make_trials(of_tasks, of_methods, of_lags, _noises(noise), seeds)
    trials = [trial for trial in every if TASKS[trial.task].is_mixture or trial.method not in OF_MIXTURES]
    part = read_shard(shard)
    file = folder / (ROWS_FILE if part.number == 1 else f"rows-{part.place}-of-{part.number}.jsonl")
    stop = StopRequest().install()
    run_study(part.of(trials), folder, file, stop, num_jobs=0 if plan else jobs, say=typer.echo)
    if stop:
        raise typer.Exit(INTERRUPTED_STATUS)


def _check_probe(noise: str, jobs: int, shard: str, *, plan: bool) -> None:
    """Raise `SettingError` for an option that `--probe` would ignore."""
    given = {
        "--plan": plan,
        "--shard": shard,
        "--jobs": jobs if jobs > 1 else 0,
        "--noise": noise if any(_noises(noise)) else "",
    }
    for option, value in given.items():
        if value:
            problem = "--probe would ignore it: it takes all its measurements, one after another and without noise"
            raise SettingError(option, value, problem, f"Leave out {option} or --probe.")


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


if __name__ == "__main__":
    run(app)
