"""Faulty reward functions are reported in words, end at the time limit, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbeat.actor.rewards import Rewarded, RewardFailure, RewardRunner, exact_match, load_reward, math_answer
from offbeat.common.settings import SettingError

pytestmark = pytest.mark.slow

USER_REWARDS = """
import asyncio, os, re, sys, time
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

def pid(prompt, completion, row):
    return os.getpid()

async def naps(prompt, completion, row):
    await asyncio.sleep(float(completion))
    return float(completion)

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

    def make(function: str, *, num_workers: int = 1, timeout_s: float = 20.0) -> RewardRunner:
        runners.append(RewardRunner(f"{module}:{function}", num_workers=num_workers, timeout_s=timeout_s))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def wait(runner: RewardRunner, limit_s: float = 20.0) -> dict[int, Rewarded | RewardFailure]:
    """Wait for every submitted group; return the outcomes by key."""
    outcomes: dict[int, Rewarded | RewardFailure] = {}
    deadline = time.monotonic() + limit_s
    while runner.num_pending and time.monotonic() < deadline:
        for outcome in runner.poll():
            assert outcome.key not in outcomes
            outcomes[outcome.key] = outcome
        time.sleep(0.005)
    assert not runner.num_pending
    return outcomes


def failure(runner: RewardRunner, *completions: str) -> RewardFailure:
    runner.submit(1, "p", completions, {})
    outcome = wait(runner)[1]
    assert isinstance(outcome, RewardFailure)
    assert "\n" not in outcome.detail
    return outcome


def line_of(code: str) -> int:
    return next(number for number, line in enumerate(USER_REWARDS.splitlines(), 1) if line == code)


def test_groups_are_rewarded_in_the_order_of_their_completions(make_runner):
    runner = make_runner("length", num_workers=2)
    for key in range(20):
        runner.submit(key, "p", ["a", "bb", "c" * key], {"bonus": key})
    outcomes = wait(runner)
    assert outcomes == {key: Rewarded(key, (1.0 + key, 2.0 + key, 2.0 * key)) for key in range(20)}
    assert runner.poll() == []


@pytest.mark.parametrize(("function", "reward"), [("numpy_value", 0.5), ("numpy_bool", 1.0)])
def test_numpy_numbers_are_rewards(make_runner, function, reward):
    runner = make_runner(function)
    runner.submit(1, "p", ["a"], {})
    assert wait(runner) == {1: Rewarded(1, (reward,))}


def test_plain_rewards_run_outside_this_process(make_runner):
    runner = make_runner("pid")
    runner.submit(1, "p", ["a"], {})
    outcome = wait(runner)[1]
    assert isinstance(outcome, Rewarded)
    assert outcome.rewards[0] != os.getpid()


def test_an_exception_is_reported_with_its_message_and_line(make_runner):
    runner = make_runner("raises")
    outcome = failure(runner, "good", "bad")
    assert outcome.reason == "reward_error"
    line = line_of('        raise ZeroDivisionError("first line\\nsecond line")')
    assert outcome.detail.startswith("ZeroDivisionError: first line second line (")
    assert outcome.detail.endswith(f"user_rewards.py:{line})")
    runner.submit(2, "p", ["good"], {})
    assert wait(runner) == {2: Rewarded(2, (1.0,))}


def test_the_line_is_the_users_also_when_a_library_raised(make_runner):
    outcome = failure(make_runner("raises_elsewhere"), "a")
    line = line_of('    return int("x")')
    assert outcome.detail.endswith(f"user_rewards.py:{line})")


@pytest.mark.parametrize(("function", "words"), [("nan", "the reward is nan"), ("text", "'1.0', not a number")])
def test_what_is_no_finite_number_is_an_error(make_runner, function, words):
    outcome = failure(make_runner(function), "a")
    assert outcome.reason == "reward_error"
    assert words in outcome.detail


@pytest.mark.parametrize("function", ["sleeps", "stuck_in_c"])
def test_a_reward_past_its_time_is_killed_and_the_next_group_is_rewarded(make_runner, function):
    runner = make_runner(function, timeout_s=0.5)
    runner.submit(0, "p", ["warm up"], {})
    wait(runner)
    started = time.monotonic()
    outcome = failure(runner, "fast", "slow")
    assert outcome.reason == "reward_timeout"
    assert "task.reward_timeout_s = 0.5" in outcome.detail
    assert time.monotonic() - started < 3
    runner.submit(2, "p", ["fast"], {})
    assert wait(runner) == {2: Rewarded(2, (1.0,))}


def test_a_reward_that_ends_its_process_fails_alone(make_runner):
    runner = make_runner("exits")
    assert failure(runner, "exit").detail.startswith("SystemExit: 3")
    assert "exit code 7" in failure(runner, "die").detail
    runner.submit(2, "p", ["stay"], {})
    assert wait(runner) == {2: Rewarded(2, (1.0,))}


def test_workers_killed_while_idle_are_replaced(make_runner):
    runner = make_runner("pid")
    runner.submit(1, "p", ["a"], {})
    first = wait(runner)[1]
    assert isinstance(first, Rewarded)
    os.kill(int(first.rewards[0]), signal.SIGKILL)
    time.sleep(0.5)
    runner.submit(2, "p", ["a"], {})
    second = wait(runner)[2]
    assert isinstance(second, Rewarded)
    assert second.rewards != first.rewards


def test_async_completions_of_a_group_run_at_once(make_runner):
    runner = make_runner("naps")
    started = time.monotonic()
    for key in range(4):
        runner.submit(key, "p", ["0.3"] * 8, {})
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
    runner.submit(1, "p", ["a"], {})
    outcome = wait(runner, limit_s=2.5)[1]
    assert isinstance(outcome, RewardFailure)
    assert outcome.reason == "reward_timeout"
    assert "must not make blocking calls" in outcome.detail


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:reward", "there is no module 'no_such_module'"),
        ("user_rewards:no_such_function", "has no 'no_such_function'"),
        ("user_rewards:number", "is a int"),
        ("user_rewards:two", "cannot take (prompt, completion, row)"),
        ("broken_rewards:reward", "ZeroDivisionError: division by zero"),
        ("unmet_rewards:reward", "No module named 'no_such_dependency'"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_at_once_in_words(module, path, words):
    with pytest.raises(SettingError) as raised:
        RewardRunner(path, num_workers=1, timeout_s=1.0)
    text = str(raised.value)
    assert "task.reward" in text
    assert path in text
    assert words in text


def test_close_ends_stuck_workers_at_once(make_runner, module):
    before = set(children_of(os.getpid()))
    runner = RewardRunner(f"{module}:stuck_in_c", num_workers=2, timeout_s=60)
    runner.submit(1, "p", ["slow"], {})
    time.sleep(1.0)
    started = time.monotonic()
    runner.close()
    assert time.monotonic() - started < 3
    assert not set(children_of(os.getpid())) - before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_do_not_outlive_a_killed_actor(module, number):
    """Workers inside a call that holds the interpreter end too."""
    script = textwrap.dedent("""
        import time
        from offbeat.actor.rewards import RewardRunner
        if __name__ == "__main__":
            runner = RewardRunner("user_rewards:stuck_in_c", num_workers=2, timeout_s=60)
            runner.submit(1, "p", ["slow"], {})
            runner.submit(2, "p", ["fast"], {})
            while runner.num_pending > 1:
                runner.poll()
            print("busy", flush=True)
            time.sleep(60)
    """)
    Path("actor_like.py").write_text(script)
    root = Path(__file__).parents[2]
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


def children_of(pid: int) -> list[int]:
    """Return live children except multiprocessing's resource tracker, which ends by itself."""
    lists = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    children = " ".join(lists).split()
    return [int(child) for child in children if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()]


def test_exact_match_ignores_white_space_around():
    assert exact_match("", " abc\n", {"answer": "abc "}) == 1.0
    assert exact_match("", "abcd", {"answer": "abc"}) == 0.0
    assert exact_match("", "12", {"answer": 12}) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("So 48 + 24 = 72.", "Natalia sold 24 in May.\n#### 72", 1.0),
        ("The answer is \\boxed{72}", "72", 1.0),
        ("it is $72.00", "#### 72", 1.0),
        ("1,234 in total", "1234", 1.0),
        ("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}", 1.0),
        ("$1 + x^2$", "x^2+1", 1.0),
        ("72 or rather 71", "72", 0.0),
        ("I do not know", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_math_answers_are_compared_as_mathematics(completion, answer, reward):
    assert math_answer("", completion, {"answer": answer}) == reward


def test_math_answer_works_in_worker_processes_and_refuses_an_empty_answer():
    runner = RewardRunner("math_answer", num_workers=1, timeout_s=30)
    try:
        runner.submit(1, "p", ["It is 72", "It is 7"], {"answer": "#### 72"})
        runner.submit(2, "p", ["It is 72"], {"answer": ""})
        runner.submit(3, "p", ["It is 72"], {})
        outcomes = wait(runner, limit_s=30)
    finally:
        runner.close()
    assert outcomes[1] == Rewarded(1, (1.0, 0.0))
    errors = [outcomes[key] for key in (2, 3)]
    assert "is not a mathematical expression" in str(errors[0])
    assert "KeyError: 'answer'" in str(errors[1])


def test_built_in_rewards_are_loaded_by_name():
    assert load_reward("exact_match") is exact_match
    assert load_reward("math_answer") is math_answer
    with pytest.raises(SettingError, match=r"no built-in reward 'exact'.*exact_match or math_answer"):
        load_reward("exact")


@pytest.fixture
def no_actor_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget modules named `actor`, because the repository's folder of that name can be imported in tests."""
    for name in [name for name in sys.modules if name.split(".")[0] == "actor"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "actor").is_dir()])


@pytest.mark.usefixtures("no_actor_imported")
def test_rewards_of_old_run_folders_are_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_reward("actor.rewards:exact_match") is exact_match
    assert load_reward("actor.rewards:math_answer") is math_answer
    with pytest.raises(SettingError, match=r"there is no module 'actor'"):
        load_reward("actor.rewards:exact")


@pytest.mark.usefixtures("no_actor_imported")
def test_a_users_own_module_comes_before_the_old_name_of_a_built_in_reward(tmp_path, monkeypatch):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "rewards.py").write_text("def exact_match(prompt, completion, row):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_reward("actor.rewards:exact_match")("", "", {}) == 0.5
    for name in ("actor.rewards", "actor"):
        del sys.modules[name]


@pytest.mark.usefixtures("no_actor_imported")
def test_a_users_own_module_that_is_broken_is_not_replaced_by_a_built_in_reward(tmp_path, monkeypatch):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "rewards.py").write_text("raise ValueError('mended soon')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingError, match="mended soon"):
        load_reward("actor.rewards:exact_match")
    sys.modules.pop("actor", None)
