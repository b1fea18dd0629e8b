"""Prompts that keep failing are dropped, and a run in which nothing succeeds ends."""

import pytest

from offbeat.learner.dispatch.run_state import LeaseFailures, RunFailedError


def make(max_failed_leases: int = 3) -> tuple[LeaseFailures, list[str]]:
    woken: list[str] = []
    return LeaseFailures(max_failed_leases, lambda: woken.append("woken")), woken


def test_prompt_is_given_up_after_its_last_attempt_and_starts_anew() -> None:
    failures, _ = make()
    for _ in range(2):
        assert [failures.is_last_attempt(7), failures.count_attempt(7)] == [False, 1]
        assert [failures.is_last_attempt(7), failures.count_attempt(7)] == [False, 2]
        assert [failures.is_last_attempt(7), failures.count_attempt(7)] == [True, 3]
        assert not failures.is_last_attempt(8), "each prompt has its own attempts"


def test_good_group_clears_the_attempts_of_its_prompt_alone() -> None:
    failures, _ = make()
    for prompt_id in (7, 7, 8, 8):
        failures.count_attempt(prompt_id)
    failures.forget(7)
    assert [failures.is_last_attempt(7), failures.is_last_attempt(8)] == [False, True]


def test_failed_leases_in_a_row_end_the_run_and_wake_who_waits_for_groups() -> None:
    failures, woken = make(max_failed_leases=3)
    for _ in range(2):
        failures.count_lease("a bad reward.")
    failures.note_good_group()
    for _ in range(2):
        failures.count_lease("a bad reward.")
    assert (failures.error, woken) == (None, [])
    failures.count_lease("a bad reward.")
    assert woken == ["woken"]
    text = r"the last 3 leases failed \(run.max_failed_leases\), the last one with a bad reward\."
    assert failures.error is not None
    with pytest.raises(RunFailedError, match=text):
        raise failures.error
