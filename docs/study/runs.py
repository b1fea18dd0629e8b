"""Runs the trials of the study in parallel processes, each trial once, and adds a row to the file as soon as one is done."""

import atexit
import itertools
import logging
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from docs.study import trials
from offbeat.common.processes.environment import prepare_environment
from offbeat.common.processes.shutdown import StopRequest, die_with_parent
from offbeat.common.settings.checks import check
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load
from offbeat.deploy.cli.arguments import QUICKSTART
from offbeat.deploy.experiments.jobs import alone_in, run_jobs

RUNS_PER_PROCESS = 20
"""A process ends after as many runs, because DeepSpeed's modules are never freed."""


def run_study(
    planned: Sequence[trials.StudyTrial],
    folder: Path,
    file: Path,
    stop: StopRequest,
    *,
    num_jobs: int,
    say: Callable[[str], None],
) -> None:
    """Run the trials that have no row in the folder, `num_jobs` at a time; only say how many they are with no jobs.

    Adds each row to `file` when its run is done. Waits for: the ends of runs. When asked to stop it finishes those under way.

    Raises the error of a run that failed, and `SettingError` when another process writes to the file.
    """
    rows = trials.read_rows(folder)
    todo = trials.left_to_do(planned, rows, {trial: settings_of(trial) for trial in planned})
    say(_plan_text(todo, rows))
    if num_jobs == 0:
        return
    for task in dict.fromkeys(trial.task for trial in todo):
        _task(task).make()
    for trial in todo:
        make_config(trial)
    with _alone_with(file), _processes(num_jobs) as processes:
        done = run_jobs(todo, lambda trial: processes.submit(run_trial, trial), stop, num_at_once=num_jobs)
        for number, (trial, row, left) in enumerate(done, start=1):
            trials.append_row(file, row)
            say(
                f"{number}/{len(todo)} {trial}: {row.outcome} after {row.num_steps} steps, "
                f"reward {row.final_reward:.3f}, {row.cpu_s:.0f} s{left}"
            )


def run_probes(
    folder: Path,
    tasks: Sequence[str],
    chosen: Sequence[str],
    lags: Sequence[int],
    *,
    num_seeds: int,
    say: Callable[[str], None],
) -> None:
    """Measure the gradients of those of the methods that have no row yet, one staleness after another.

    Raises `SettingError` when another process measures into the same folder.
    """
    file = folder / trials.PROBE_FILE
    with _alone_with(file):
        done = {(row.task, row.lag, row.seed, row.method) for row in trials.read_lines(file, trials.ProbeRow)}
        for seed, task, lag in itertools.product(range(num_seeds), tasks, lags):
            fitting = [method for method in chosen if _task(task).is_mixture or method not in trials.OF_MIXTURES]
            left = [method for method in fitting if (task, lag, seed, method) not in done]
            if not left:
                continue
            _task(task).make()
            for row in probe_lag(task, lag, seed, left):
                trials.append_row(file, row)
            say(f"{task}, lag {lag}, seed {seed}: {len(left)} methods")


def _plan_text(todo: Sequence[trials.StudyTrial], rows: Sequence[trials.StudyRow]) -> str:
    """Return the number of runs left, and the CPU hours that those of the same task and lag have taken."""
    hours = 0.0
    unknown = 0
    for trial in todo:
        of_task = [row for row in rows if row.task == trial.task]
        nearest = min((abs(row.lag - trial.lag) for row in of_task), default=0)
        alike = [row.cpu_s for row in of_task if abs(row.lag - trial.lag) == nearest]
        hours += statistics.fmean(alike) / 3600 if alike else 0.0
        unknown += not alike
    text = f"{len(todo)} runs are to be done"
    if unknown < len(todo):
        text += f"; about {hours:.1f} CPU hours by the rows there"
    return text + (f", without {unknown} runs of tasks that have none" if 0 < unknown < len(todo) else "")


def settings_of(trial: trials.StudyTrial) -> tuple[str, ...]:
    """Return the settings of a trial's run besides those of the quick start, as its row has them."""
    return (*_task(trial.task).settings, *trials.methods()[trial.method])


def make_config(trial: trials.StudyTrial) -> Config:
    """Return the settings of a trial's run, those of the quick start included. Raise `SettingError` for invalid ones."""
    # The methods of the first rows have one band for all completions of a run; one that has another names it.
    config = load(QUICKSTART, ["loss.clip_by=run", *settings_of(trial), f"run.seed={trial.seed}"])
    config = replace(config, model=replace(config.model, path=_task(trial.task).model_path))
    # Every method trains on as many completions per step, whatever the size of its groups.
    times, size = load(QUICKSTART).rollout.group_size, config.rollout.group_size
    config = replace(config, train=replace(config.train, groups_per_step=config.train.groups_per_step * times // size))
    check(config)
    return config


def run_trial(trial: trials.StudyTrial) -> trials.StudyRow:
    """Run a trial in this process, on one thread."""
    import torch

    from docs.study.exact_run import run_exactly

    torch.set_num_threads(1)
    started = time.process_time()
    config = make_config(trial)
    prompts, held_out = _prompts(trial.task)
    result = run_exactly(config, prompts, held_out, lag=trial.lag, noise=trial.noise)
    return trials.StudyRow(
        *trial,
        settings=settings_of(trial),
        outcome=result.outcome,
        num_steps=result.num_steps,
        final_reward=round(result.final_reward, 4),
        cpu_s=round(time.process_time() - started, 1),
        points=result.points,
    )


def probe_lag(task: str, lag: int, seed: int, chosen: Sequence[str]) -> list[trials.ProbeRow]:
    """Measure the gradients of these methods at one staleness in this process, on one thread; see `docs.study.probe`."""
    import torch

    from docs.study.probe import probe

    torch.set_num_threads(1)
    configs = {method: make_config(trials.StudyTrial(task, method, lag, 0.0, seed)) for method in (trials.BASELINE, *chosen)}
    prompts, _ = _prompts(task)
    return probe(task, configs[trials.BASELINE], {method: configs[method] for method in chosen}, prompts, lag=lag)


def _alone_with(file: Path) -> AbstractContextManager[None]:
    return alone_in(file.parent, name=f".{file.name}.lock", setting="FOLDER")


def _processes(num_jobs: int) -> ProcessPoolExecutor:
    # Spawned: a forked process would have torch's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        num_jobs, context, initializer=_begin_process, initargs=(os.getpid(),), max_tasks_per_child=RUNS_PER_PROCESS
    )


def _begin_process(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    # Ctrl-C is for the parent, which lets the runs under way end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries print a page when the interpreter frees them.
    atexit.register(os._exit, 0)
    prepare_environment()
    logging.basicConfig(level=logging.WARNING)


def _task(name: str):
    # Imported here: it imports torch, for which a process is prepared first.
    from docs.study.tasks import TASKS

    return TASKS[name]


@cache
def _prompts(task: str):
    return _task(task).prompts()
