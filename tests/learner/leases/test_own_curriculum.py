"""The user's curriculum returns a weight for each task in time, or is refused with the reason."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.common.errors import SettingError
from offbeat.learner.curriculum import OwnCurriculum
from offbeat.learner.leases.groups import GroupRewards, TaskResults

RESULTS = {"sums": TaskResults(3, 1.0, 2, (GroupRewards(0.5, 0.0, 1.0),)), "sorting": TaskResults(4, 0.5)}


ROOT = Path(__file__).parents[3]


def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: Callable[..., Any], limit_s: float = 5.0) -> OwnCurriculum:
    """Return the function as a module of the user's has it."""
    monkeypatch.chdir(tmp_path)
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("def weigh(results, policy_version): return chosen(results, policy_version)")
    curriculum = OwnCurriculum(f"{name}:weigh", limit_s)
    __import__(name).chosen = function
    return curriculum


def test_weights_become_shares_of_which_the_largest_is_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[object] = []

    def weigh(results: dict[str, TaskResults], policy_version: int) -> dict[str, Any]:
        seen.append((results, policy_version))
        results.clear()
        return {"sorting": True, "sums": 4}

    assert load(monkeypatch, tmp_path, weigh)(RESULTS, 7) == {"sums": 1.0, "sorting": 0.25}
    assert (seen, len(RESULTS)) == ([({}, 7)], 2)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "it returned NoneType"),
        ([1.0, 2.0], "it returned list"),
        ({"sums": 1, "sortin": 1}, "a weight for 'sortin', which is no task (did you mean 'sorting'?)"),
        ({"sums": 1, 3: 1}, "a weight for 3, which is no task (the tasks are sums, sorting)"),
        ({"sums": 1}, "no weight for the task 'sorting'"),
        ({"sums": 1, "sorting": -0.5}, "-0.5 for the task 'sorting'"),
        ({"sums": float("nan"), "sorting": 1}, "nan for the task 'sums'"),
        ({"sums": float("inf"), "sorting": 1}, "inf for the task 'sums'"),
        ({"sums": "much", "sorting": 1}, "'much' for the task 'sums'"),
        ({"sums": 0, "sorting": 0.0}, "all weights are 0"),
    ],
)
def test_what_is_no_weight_of_each_task_is_refused(
    returned: object, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=r"^data\.curriculum = .*Return a number of at least 0 for each task") as raised:
        load(monkeypatch, tmp_path, lambda *_: returned)(RESULTS, 0)
    assert said in str(raised.value)


@pytest.mark.parametrize("error", [KeyError("absent"), SystemExit(3)])
def test_function_that_raises_is_refused_with_its_place(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise error

    with pytest.raises(SettingError, match=rf"it raised {type(error).__name__}.*{Path(__file__).name}:\d+"):
        load(monkeypatch, tmp_path, fail)(RESULTS, 0)


def test_function_that_takes_too_long_is_not_called_again_before_it_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    goes_on = threading.Event()
    calls: list[int] = []

    def slow(results: dict[str, TaskResults], policy_version: int) -> dict[str, float]:
        calls.append(policy_version)
        goes_on.wait(10)
        return dict.fromkeys(results, 1.0)

    curriculum = load(monkeypatch, tmp_path, slow, limit_s=0.05)
    with pytest.raises(SettingError, match=r"more than 0\.05 s"):
        curriculum(RESULTS, 0)
    with pytest.raises(SettingError, match="an earlier call of the function has not ended yet"):
        curriculum(RESULTS, 1)
    goes_on.set()
    assert curriculum._call is not None
    curriculum._call.join(10)
    assert curriculum(RESULTS, 2) == {"sums": 1.0, "sorting": 1.0}
    assert calls == [0, 2]


def test_function_that_cannot_take_the_results_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "narrow_curriculum.py").write_text("def weigh(results): return {}")
    with pytest.raises(SettingError, match=r"cannot take \(results, policy_version\)"):
        OwnCurriculum("narrow_curriculum:weigh")


def results_of(task: str, *rewards: tuple[float, float]) -> dict[str, TaskResults]:
    """Return results in which one task has groups of these lowest and highest rewards, and another none."""
    groups = tuple(GroupRewards((low + high) / 2, low, high) for low, high in rewards)
    return {task: TaskResults(9, 1.0, len(groups), groups), "hard": TaskResults(9, 1.0)}


def test_curriculum_of_the_docs_goes_on_to_the_hard_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code = (ROOT / "docs/data.md").read_text().split("## A curriculum")[1].split("```python")[1].split("```")[0]
    (tmp_path / "levels_of_the_docs.py").write_text(code)
    curriculum = OwnCurriculum("levels_of_the_docs:weigh")
    for results in (results_of("easy"), results_of("easy", *[(0.0, 1.0)] * 64), results_of("easy", *[(1.0, 1.0)] * 63)):
        assert curriculum(results, 1) == {"easy": 1.0, "hard": 0.0}
    assert curriculum(results_of("easy", *[(0.8, 1.0)] * 64), 1) == {"easy": 0.1, "hard": 1.0}


def test_curriculum_of_the_example_leaves_what_gives_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    curriculum = OwnCurriculum("examples.reasoning.signal_weights:weigh")
    assert curriculum(results_of("easy"), 0) == {"easy": 1.0, "hard": 1.0}
    assert curriculum(results_of("easy", (0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 1.0)), 1) == {"easy": 0.25, "hard": 1.0}
    assert curriculum(results_of("easy", (0.0, 0.0), (1.0, 1.0)), 1) == {"easy": 0.1, "hard": 1.0}
