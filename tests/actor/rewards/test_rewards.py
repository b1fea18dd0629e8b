"""Faulty reward functions are reported in words, end at the time limit, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat.actor.rewards import calling
from offbeat.actor.rewards.failures import SamplingFailure
from offbeat.actor.rewards.runner import Rewarded, RewardRunner
from offbeat.common.errors import SettingError
from tests.actor.rewards.reward_harness import make_runner_of, rewarded, samples, wait

pytestmark = pytest.mark.slow

USER_REWARDS = """
import asyncio, os, re, signal, subprocess, sys, time
import numpy as np

def length(prompt, completion, row):
    return len(completion) + row.get("bonus", 0)

def numpy_value(prompt, completion, row):
    return np.float32(0.5)

def numpy_bool(prompt, completion, row):
    return np.bool_(True)

def raises(prompt, completion, row):
    if completion == "bad":
        raise ZeroDivisionError("first line\\nsecond line")
    return 1.0

def raises_elsewhere(prompt, completion, row):
    return int("x")

def nan(prompt, completion, row):
    return float("nan")

def text(prompt, completion, row):
    return "1.0"

def sleeps(prompt, completion, row):
    if completion == "slow":
        time.sleep(60)
    return 1.0

def takes_note(prompt, completion, row):
    with open("notes", "a") as notes:
        notes.write(completion)
    while not os.path.exists("go"):
        time.sleep(0.01)
    return 1.0

def stuck_in_c(prompt, completion, row):
    if completion == "slow":
        re.match("(a+)+$", "a" * 60 + "b")
    return 1.0

def exits(prompt, completion, row):
    if completion == "exit":
        sys.exit(3)
    if completion == "die":
        os._exit(7)
    return 1.0

def is_asked_to_end(prompt, completion, row):
    os.kill(os.getpid(), signal.SIGTERM)
    return float(subprocess.call(["sh", "-c", "kill -TERM $$"]))

def pid(prompt, completion, row):
    return os.getpid()

def hangs_once(prompt, completion, row):
    if completion == "slow" and not os.path.exists(row["seen"]):
        open(row["seen"], "w").close()
        time.sleep(60)
    return float(len(completion))

def noted(prompt, completion, row):
    with open(row["calls"], "a") as file:
        file.write(completion + "\\n")
    if completion == "slow" and open(row["calls"]).read().split().count("slow") == 1:
        time.sleep(60)
    return 1.0

async def naps(prompt, completion, row):
    await asyncio.sleep(float(completion))
    return float(completion)

def interrupts(prompt, completion, row):
    if completion == "bad":
        raise KeyboardInterrupt("from a library")
    return 1.0

async def async_interrupts(prompt, completion, row):
    return interrupts(prompt, completion, row)

async def leaves_a_task_that_interrupts(prompt, completion, row):
    async def interrupt():
        interrupts(prompt, completion, row)
    if completion == "bad":
        asyncio.ensure_future(interrupt())
        await asyncio.sleep(0.05)
    return 1.0

def counts_in_its_row(prompt, completion, row):
    row["seen"] = row.get("seen", 0) + 1
    return row["seen"]

async def async_counts_in_its_row(prompt, completion, row):
    return counts_in_its_row(prompt, completion, row)

async def async_raises(prompt, completion, row):
    raise KeyError("missing")

async def blocks(prompt, completion, row):
    time.sleep(3)
    return 1.0

def two(prompt, completion):
    return 1.0

number = 3
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A module with a user's reward functions, in the current folder."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "user_rewards.py").write_text(USER_REWARDS)
    (folder / "broken_rewards.py").write_text("import user_rewards\n1 / 0\n")
    (folder / "unmet_rewards.py").write_text("import no_such_dependency\n")
    before = Path.cwd(), list(sys.path)
    os.chdir(folder)
    yield "user_rewards"
    os.chdir(before[0])
    sys.path[:] = before[1]


@pytest.fixture
def make_runner(module: str) -> Iterator[Callable[..., RewardRunner]]:
    runners: list[RewardRunner] = []

    def make(function: str, **limits: Any) -> RewardRunner:
        runners.append(make_runner_of(f"{module}:{function}", **limits))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def failure(runner: RewardRunner, *completions: str) -> SamplingFailure:
    runner.submit(1, samples(completions))
    outcome = wait(runner)[1]
    assert isinstance(outcome, SamplingFailure)
    assert "\n" not in outcome.detail
    return outcome


def line_of(code: str) -> int:
    return next(number for number, line in enumerate(USER_REWARDS.splitlines(), 1) if line == code)


def test_groups_are_rewarded_in_the_order_of_their_completions(make_runner):
    runner = make_runner("length", num_workers=2)
    for key in range(20):
        runner.submit(key, samples(["a", "bb", "c" * key], {"bonus": key}))
    outcomes = wait(runner)
    assert outcomes == {key: rewarded(key, 1.0 + key, 2.0 + key, 2.0 * key) for key in range(20)}
    assert runner.poll() == []


@pytest.mark.parametrize(("function", "reward"), [("numpy_value", 0.5), ("numpy_bool", 1.0)])
def test_numpy_numbers_are_rewards(make_runner, function, reward):
    runner = make_runner(function)
    runner.submit(1, samples(["a"]))
    assert wait(runner) == {1: rewarded(1, reward)}


def test_plain_rewards_run_outside_this_process(make_runner):
    runner = make_runner("pid")
    runner.submit(1, samples(["a"]))
    outcome = wait(runner)[1]
    assert isinstance(outcome, Rewarded)
    assert outcome.rewards[0].total != os.getpid()


def test_an_exception_is_reported_with_its_message_and_line(make_runner):
    runner = make_runner("raises")
    outcome = failure(runner, "good", "bad")
    assert outcome.reason == "reward_error"
    line = line_of('        raise ZeroDivisionError("first line\\nsecond line")')
    assert outcome.detail.startswith("ZeroDivisionError: first line second line (")
    assert outcome.detail.endswith(f"user_rewards.py:{line})")
    runner.submit(2, samples(["good"]))
    assert wait(runner) == {2: rewarded(2, 1.0)}


def test_the_line_is_the_users_also_when_a_library_raised(make_runner):
    outcome = failure(make_runner("raises_elsewhere"), "a")
    line = line_of('    return int("x")')
    assert outcome.detail.endswith(f"user_rewards.py:{line})")


@pytest.mark.parametrize("function", ["interrupts", "async_interrupts"])
def test_a_reward_that_raises_an_interrupt_fails_its_own_group_only(make_runner, function):
    runner = make_runner(function)
    assert failure(runner, "bad").detail.startswith("KeyboardInterrupt: from a library")
    runner.submit(1, samples(["good"]))
    assert wait(runner) == {1: rewarded(1, 1.0)}


def test_an_interrupt_in_a_task_that_a_reward_left_behind_ends_no_rewards(make_runner):
    runner = make_runner("leaves_a_task_that_interrupts")
    runner.submit(0, samples(["bad", "good"]))
    assert wait(runner) == {0: rewarded(0, 1.0, 1.0)}
    runner.submit(1, samples(["good"]))
    assert wait(runner) == {1: rewarded(1, 1.0)}


@pytest.mark.parametrize("function", ["counts_in_its_row", "async_counts_in_its_row"])
def test_a_reward_that_changes_its_row_changes_it_for_no_other_completion(make_runner, function):
    runner = make_runner(function)
    row = {"answer": "x"}
    runner.submit(0, [sample._replace(row=row) for sample in samples(["a", "b", "c"])])
    assert wait(runner) == {0: rewarded(0, 1.0, 1.0, 1.0)}
    assert row == {"answer": "x"}


@pytest.mark.parametrize(("function", "words"), [("nan", "the reward is nan"), ("text", "'1.0', not a number")])
def test_what_is_no_finite_number_is_an_error(make_runner, function, words):
    outcome = failure(make_runner(function), "a")
    assert outcome.reason == "reward_error"
    assert words in outcome.detail


@pytest.mark.parametrize("function", ["sleeps", "stuck_in_c"])
def test_a_reward_past_its_time_is_killed_and_the_next_group_is_rewarded(make_runner, function):
    runner = make_runner(function, timeout_s=0.5)
    runner.submit(0, samples(["warm up"]))
    wait(runner)
    started = time.monotonic()
    outcome = failure(runner, "fast", "slow")
    assert outcome.reason == "reward_timeout"
    assert "task.reward_timeout_s = 0.5" in outcome.detail
    assert time.monotonic() - started < 3
    runner.submit(2, samples(["fast"]))
    assert wait(runner) == {2: rewarded(2, 1.0)}


def test_completions_beside_one_that_hung_once_are_all_rewarded(make_runner, tmp_path):
    runner = make_runner("hangs_once", timeout_s=1.0, retry_s=20.0)
    runner.submit(1, samples(["a", "slow", "bb"], {"seen": str(tmp_path / "seen")}))
    assert wait(runner) == {1: rewarded(1, 1.0, 4.0, 2.0)}


def test_groups_after_one_that_exceeded_the_limit_together_are_called_for_each_completion(make_runner, tmp_path):
    runner = make_runner("noted", timeout_s=1.0, retry_s=20.0)
    calls = []
    for key in range(2):
        file = tmp_path / str(key)
        runner.submit(key, samples(["a", "slow", "bb"], {"calls": str(file)}))
        assert wait(runner) == {key: rewarded(key, 1.0, 1.0, 1.0)}
        calls.append(sorted(file.read_text().split()))
    assert calls == [["a", "a", "bb", "slow", "slow"], ["a", "bb", "slow", "slow"]]


def test_a_reward_that_hangs_every_time_keeps_a_process_busy_for_three_attempts_only(make_runner, monkeypatch):
    monkeypatch.setattr("offbeat.actor.rewards.retries.FIRST_DELAY_S", 0.01)
    runner = make_runner("sleeps", timeout_s=0.2, retry_s=600.0)
    outcome = failure(runner, "fast", "slow")
    assert outcome.reason == "reward_timeout"
    assert "; tried 3 times in " in outcome.detail
    assert runner.retries.trouble(time.monotonic()) is None


def test_a_reward_that_ends_its_process_fails_alone(make_runner):
    runner = make_runner("exits")
    assert failure(runner, "exit").detail.startswith("SystemExit: 3")
    assert "exit code 7" in failure(runner, "die").detail
    runner.submit(2, samples(["stay"]))
    assert wait(runner) == {2: rewarded(2, 1.0)}


def test_a_reward_is_finished_when_everybody_gets_sigterm_but_its_programs_end(make_runner):
    runner = make_runner("is_asked_to_end")
    runner.submit(1, samples(["a"]))
    assert wait(runner) == {1: rewarded(1, -signal.SIGTERM)}


def test_workers_killed_while_idle_are_replaced(make_runner):
    runner = make_runner("pid")
    runner.submit(1, samples(["a"]))
    first = wait(runner)[1]
    assert isinstance(first, Rewarded)
    os.kill(int(first.rewards[0].total), signal.SIGKILL)
    time.sleep(0.5)
    runner.submit(2, samples(["a"]))
    second = wait(runner)[2]
    assert isinstance(second, Rewarded)
    assert second.rewards != first.rewards


def test_rewards_that_wait_when_an_idle_worker_dies_are_computed_by_another(make_runner):
    runner = make_runner("pid")
    runner.submit(0, samples(["a"]))
    for key in range(3):
        idle = wait(runner)[key]
        assert isinstance(idle, Rewarded)
        os.kill(int(idle.rewards[0].total), signal.SIGSTOP)
        runner.submit(key + 1, samples(["a"]))
        time.sleep(0.1)
        os.kill(int(idle.rewards[0].total), signal.SIGKILL)
    assert isinstance(wait(runner)[3], Rewarded)


def test_reward_that_waits_beside_one_that_ends_its_process_is_computed(make_runner):
    runner = make_runner("exits")
    runner.submit(1, samples(["die"]))
    runner.submit(2, samples(["stay"]))
    outcomes = wait(runner)
    assert outcomes[2] == rewarded(2, 1.0)
    assert isinstance(outcomes[1], SamplingFailure)


def test_processes_that_cannot_start_are_given_up_as_rewards_that_may_come_later(make_runner, monkeypatch):
    # It takes no argument, so that each process fails as it starts.
    monkeypatch.setattr(calling, "_prepare_worker", os.abort)
    failed = failure(make_runner("pid"), "a")
    assert (failed.reason, failed.detail.partition(";")[0]) == ("reward_unavailable", "the reward processes died 3 times")


def test_async_completions_of_a_group_run_at_once(make_runner):
    runner = make_runner("naps")
    started = time.monotonic()
    for key in range(4):
        runner.submit(key, samples(["0.3"] * 8))
    assert len(wait(runner)) == 4
    assert time.monotonic() - started < 1.5


def test_async_rewards_are_timed_out_and_described(make_runner):
    assert failure(make_runner("naps", timeout_s=0.2), "0.01", "30").reason == "reward_timeout"
    outcome = failure(make_runner("async_raises"), "a")
    assert outcome.reason == "reward_error"
    line = line_of('    raise KeyError("missing")')
    assert outcome.detail.startswith("KeyError: 'missing' (") and f"user_rewards.py:{line})" in outcome.detail


def test_an_async_reward_that_blocks_the_loop_still_times_out(make_runner):
    runner = make_runner("blocks", timeout_s=0.2)
    runner.submit(1, samples(["a"]))
    outcome = wait(runner, limit_s=2.5)[1]
    assert isinstance(outcome, SamplingFailure)
    assert outcome.reason == "reward_timeout"
    assert "must not make blocking calls" in outcome.detail


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:reward", "there is no module 'no_such_module'"),
        ("user_rewards:no_such_function", "has no 'no_such_function'"),
        ("user_rewards:number", "is of type int"),
        ("user_rewards:two", "cannot take (prompt, completion, row)"),
        ("broken_rewards:reward", "ZeroDivisionError: division by zero"),
        ("unmet_rewards:reward", "No module named 'no_such_dependency'"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_at_once_in_words(module, path, words):
    with pytest.raises(SettingError) as raised:
        make_runner_of(path)
    text = str(raised.value)
    assert "task.reward" in text
    assert path in text
    assert words in text


def test_close_ends_stuck_workers_at_once(make_runner, module):
    before = set(children_of(os.getpid()))
    runner = make_runner_of(f"{module}:stuck_in_c", num_workers=2)
    runner.submit(1, samples(["slow"]))
    time.sleep(1.0)
    started = time.monotonic()
    runner.close()
    assert time.monotonic() - started < 3
    assert not set(children_of(os.getpid())) - before


def test_processes_do_not_work_for_groups_that_were_cancelled_in_the_line(make_runner):
    runner = make_runner("takes_note")
    for key, text in enumerate("abc"):
        runner.submit(key, samples([text]))
    notes = Path("notes")
    while not notes.exists() or not notes.read_text():
        time.sleep(0.01)
    runner.cancel(1)
    Path("go").touch()
    assert wait(runner) == {0: rewarded(0, 1.0), 2: rewarded(2, 1.0)}
    assert notes.read_text() == "ac"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_do_not_outlive_a_killed_actor(module, number):
    """Workers inside a call that holds the interpreter end too."""
    script = textwrap.dedent("""
        import time
        from offbeat.actor.rewards.runner import RewardRunner
        from offbeat.actor.rewards.samples import Sample
        from offbeat.common.settings.config import ActorSection, TaskSection
        if __name__ == "__main__":
            task = TaskSection(reward="user_rewards:stuck_in_c", reward_timeout_s=60, reward_retry_s=0)
            runner = RewardRunner(task, ActorSection(reward_workers=2))
            for key, text in enumerate(["slow", "fast"]):
                runner.submit(key, [Sample("p", text, {}, None, "stop", False)])
            while runner.num_pending > 1:
                runner.poll()
            print("busy", flush=True)
            time.sleep(60)
    """)
    Path("actor_like.py").write_text(script)
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "actor_like.py"],
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        workers = children_of(process.pid)
        assert len(workers) >= 2
        process.send_signal(number)
        process.wait(10)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_process_that_is_killed_while_the_reward_processes_start_leaves_no_semaphore() -> None:
    name = f"mp-test{os.getpid()}-{time.time_ns()}"
    program = f"""
        import os, signal
        from multiprocessing import synchronize, util
        from offbeat.actor.rewards.runner import RewardRunner
        from offbeat.common.settings.config import ActorSection, TaskSection

        def die(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)

        synchronize.SemLock._make_name = staticmethod(lambda: "/{name}")
        util.spawnv_passfds = die  # what starts the resource tracker
        RewardRunner(TaskSection(reward="math_answer"), ActorSection())
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    semaphore = Path(f"/dev/shm/sem.{name}")
    is_left = semaphore.exists()
    semaphore.unlink(missing_ok=True)
    assert (ended.returncode, is_left) == (-signal.SIGKILL, False)


def children_of(pid: int) -> list[int]:
    """Return live children except multiprocessing's resource tracker, which ends by itself."""
    lists = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    children = " ".join(lists).split()
    return [int(child) for child in children if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()]


def test_math_answer_works_in_worker_processes_and_refuses_an_empty_answer():
    runner = make_runner_of("math_answer", timeout_s=30.0)
    try:
        runner.submit(1, samples(["It is 72", "It is 7"], {"answer": "#### 72"}))
        runner.submit(2, samples(["It is 72"], {"answer": ""}))
        runner.submit(3, samples(["It is 72"]))
        outcomes = wait(runner, limit_s=30)
    finally:
        runner.close()
    assert outcomes[1] == rewarded(1, 1.0, 0.0)
    errors = [outcomes[key] for key in (2, 3)]
    assert "is not a mathematical expression" in str(errors[0])
    assert "KeyError: 'answer'" in str(errors[1])
