"""Claims about `deploy.experiments.jobs`: every job runs once, in order, no more than asked at a time; a stop loses none."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.processes.shutdown import StopRequest
from offbeat.deploy.experiments.jobs import run_jobs


@given(num_jobs=st.integers(0, 12), num_at_once=st.integers(1, 4))
def test_every_job_is_done_once_and_in_order(num_jobs: int, num_at_once: int) -> None:
    submitted: list[int] = []

    def submit(job: int) -> Future[str]:
        submitted.append(job)
        future: Future[str] = Future()
        future.set_result(f"done {job}")
        return future

    done = list(run_jobs(range(num_jobs), submit, StopRequest(), num_at_once=num_at_once))
    assert submitted == list(range(num_jobs))
    assert sorted((job, result) for job, result, _ in done) == [(job, f"done {job}") for job in range(num_jobs)]
    assert [bool(left) for _, _, left in done] == [True] * (num_jobs - 1) + [False] * bool(num_jobs)


def test_a_stop_submits_no_more_and_yields_those_under_way() -> None:
    under_way: list[Future[str]] = []
    stop = StopRequest()

    def submit(job: int) -> Future[str]:
        under_way.append(Future())
        if len(under_way) == 3:
            stop.ask("a test")
            # They end only now, when three are under way.
            for future in under_way:
                future.set_result("done")
        return under_way[-1]

    assert sorted(job for job, _, _ in run_jobs(range(9), submit, stop, num_at_once=3)) == [0, 1, 2]
    assert len(under_way) == 3


def test_no_more_jobs_are_under_way_than_asked_for() -> None:
    most: list[int] = []
    with ThreadPoolExecutor(9) as threads:
        submitted: list[Future[None]] = []

        def submit(job: int) -> Future[None]:
            submitted.append(threads.submit(time.sleep, 0.05))
            most.append(sum(not future.done() for future in submitted))
            return submitted[-1]

        done = list(run_jobs(range(6), submit, StopRequest(), num_at_once=2))
    assert len(done) == 6
    assert max(most) <= 2


def test_the_error_of_a_job_is_raised_once_those_under_way_are_yielded() -> None:
    submitted: list[int] = []
    with ThreadPoolExecutor(9) as threads:

        def work(job: int) -> int:
            if job == 0:
                raise RuntimeError("a job failed")
            time.sleep(0.1)
            return job

        def submit(job: int) -> Future[int]:
            submitted.append(job)
            return threads.submit(work, job)

        done: list[int] = []
        with pytest.raises(RuntimeError, match="a job failed"):
            done.extend(result for _, result, _ in run_jobs(range(9), submit, StopRequest(), num_at_once=3))
    assert sorted(done) == [1, 2]
    assert submitted == [0, 1, 2], "none is submitted after the error"
