"""Jobs of a sweep or a study: run in their order, several at a time, in a folder that is locked for one program."""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TypeVar

from offbeat.common.errors import SettingError
from offbeat.common.formats import duration
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.run_folder import writing

LOOK_S = 1.0
"""Longest time between two looks at whether to stop."""
LOCK_FILE = ".lock"
LOCK_LOOK_S = 0.1
"""Seconds between two tries to get a lock that another program holds."""
Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    jobs: Sequence[Job], submit: Callable[[Job], Future[Result]], stop: StopRequest, *, num_at_once: int
) -> Iterator[tuple[Job, Result, str]]:
    """Submit the jobs in their order, `num_at_once` at a time, and yield each with its result when it is done.

    With them comes an estimate of the time that the others take, as the end of a sentence; empty after the last job.

    Waits for: the end of a job, looking every `LOOK_S` at `stop`. After `stop`, or an error in a job, it submits no more, but
    still waits for the jobs under way, and yields them. Raises the first error at the end.
    """
    failure: BaseException | None = None
    began = time.monotonic()
    waiting, running, number = iter(jobs), dict[Future[Result], Job](), 0
    while True:
        while not stop and failure is None and len(running) < num_at_once and (job := next(waiting, None)) is not None:
            running[submit(job)] = job
        if not running:
            break
        done, _ = wait(running, timeout=LOOK_S, return_when=FIRST_COMPLETED)
        for future in done:
            job = running.pop(future)
            if (error := future.exception()) is not None:
                failure = failure or error
                continue
            number += 1
            left_s = (time.monotonic() - began) / number * (len(jobs) - number)
            yield job, future.result(), (f"; about {duration(left_s)} left" if left_s else "")
    if failure is not None:
        raise failure


class FolderBusyError(SettingError):
    """Another program works in the folder."""


@contextlib.contextmanager
def alone_in(folder: Path, *, name: str = LOCK_FILE, wait_s: float = 0.0, setting: str = "--out") -> Iterator[None]:
    """Lock the folder by a file of this name, and make the folder if need be. The kernel frees the lock of a dead process.

    Waits for: the end of another program's lock, `wait_s` seconds. Raises `FolderBusyError` when it still holds then, and
    `SettingError` for a folder that cannot be made or written; `setting` is the option that names the folder.
    """
    deadline = time.monotonic() + wait_s
    with writing(folder, setting):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / name).open("w")
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    problem = "another sweep or study is running there"
                    raise FolderBusyError(setting, str(folder), problem, "Wait for its end, or stop it.") from error
            time.sleep(LOCK_LOOK_S)
        yield
