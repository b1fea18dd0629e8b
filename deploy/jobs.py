"""Runs a list of jobs in their order, several at a time, until all are done or a signal asks to stop."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Generic, NamedTuple, TypeVar

from offbeat.common.formats import duration
from offbeat.common.processes.shutdown import StopRequest

LOOK_S = 1.0
"""Longest time between two looks at whether to stop."""

Job = TypeVar("Job")
Result = TypeVar("Result")


class Done(NamedTuple, Generic[Job, Result]):
    """A job that is done."""

    job: Job
    result: Result
    number: int
    """Number of jobs that are done, this one included."""
    left: str
    """Estimate of the time that the others take, as the end of a sentence; empty after the last job."""


def run_jobs(
    jobs: Sequence[Job], submit: Callable[[Job], Future[Result]], stop: StopRequest, *, num_at_once: int
) -> Iterator[Done[Job, Result]]:
    """Submit the jobs in their order, `num_at_once` at a time, and yield each when it is done; submit none after `stop`.

    Waits for: the end of a job, looking every `LOOK_S` at `stop`. After `stop` it still waits for the jobs under way, and
    yields them. Raises the error that a job raised.
    """
    began = time.monotonic()
    waiting, running, number = iter(jobs), dict[Future[Result], Job](), 0
    while True:
        while not stop and len(running) < num_at_once and (job := next(waiting, None)) is not None:
            running[submit(job)] = job
        if not running:
            return
        done, _ = wait(running, timeout=LOOK_S, return_when=FIRST_COMPLETED)
        for future in done:
            number += 1
            left_s = (time.monotonic() - began) / number * (len(jobs) - number)
            yield Done(running.pop(future), future.result(), number, f"; about {duration(left_s)} left" if left_s else "")
