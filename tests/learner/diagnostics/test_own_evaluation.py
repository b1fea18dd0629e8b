"""The user's numbers about an evaluation are in its row; a function that fails or hangs costs only them."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EvalRow, EventRow, Row
from offbeat.learner.diagnostics.own_evaluation import EvaluatedCompletion, EvaluationNumbers, load_evaluation
from offbeat.learner.leases.groups import Rollout
from offbeat.learner.leases.prompts import Prompt

PROMPTS = [
    Prompt(0, "12>", np.zeros(1, np.int32), '{"prompt": "12>", "answer": "21"}', data_set="math"),
    Prompt(1, "34>", np.zeros(1, np.int32), '{"prompt": "34>", "answer": "43"}', data_set="code"),
]
FUNCTIONS = """
def good(completions): return {"number": len(completions), "share": True}
def nothing(completions): return {}
def number(completions): return 0.5
def nan(completions): return {"share": float("nan")}
def text(completions): return {"share": "0.5"}
def name(completions): return {"a share": 0.5}
def many(completions): return {f"n{index}": 0.0 for index in range(33)}
def fails(completions): return {"share": 1 / 0}
def leaves(completions): raise SystemExit(0)
def two(a, b): return {}
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evaluation_functions.py").write_text(FUNCTIONS)


def rollout(*token_ids: int, reward: float = 0.0, finish_reason: str = "stop") -> Rollout:
    ids = np.array(token_ids, np.int32)
    return Rollout(ids, np.zeros(len(ids), np.float32), reward, finish_reason, (), {"right": reward})


ROLLOUTS = {1: (rollout(4, 3, reward=1.0), rollout(4, finish_reason="length")), 0: (rollout(2, 1, reward=1.0),)}


def row(policy_version: int) -> EvalRow:
    return EvalRow(policy_version=policy_version, reward=0.5, length=2.0, num_completions=3, num_failed=0)


class Bench:
    """The numbers of a function, and the rows that come of them."""

    def __init__(self, function: Callable[[Sequence[EvaluatedCompletion]], dict[str, float]], limit_s: float = 60.0) -> None:
        self.rows: list[Row] = []
        self.recorded = threading.Condition()
        self.numbers = EvaluationNumbers(function, PROMPTS, lambda ids: "".join(map(str, ids)), self._record, limit_s=limit_s)

    def _record(self, row: Row) -> None:
        with self.recorded:
            self.rows.append(row)
            self.recorded.notify_all()

    def evaluations(self) -> list[tuple[int, dict[str, float]]]:
        return [(row.policy_version, row.numbers) for row in self.rows if isinstance(row, EvalRow)]

    def events(self) -> list[str]:
        return [row.detail for row in self.rows if isinstance(row, EventRow)]


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Return an event that ends calls which wait for it, at the test's end at the latest."""
    event = threading.Event()
    yield event
    event.set()


def test_function_gets_each_completion_with_its_prompt_and_its_numbers_are_in_the_row() -> None:
    seen: list[EvaluatedCompletion] = []

    def measured(completions: Sequence[EvaluatedCompletion]) -> dict[str, float]:
        seen.extend(completions)
        return {"cut": 0.25}

    bench = Bench(measured)
    bench.numbers.finish(row(10), ROLLOUTS)
    bench.numbers.close()
    assert bench.evaluations() == [(10, {"cut": 0.25})]
    assert [row.reward for row in bench.rows if isinstance(row, EvalRow)] == [0.5]
    fields = {"prompt": "34>", "answer": "43"}
    assert seen == [
        EvaluatedCompletion(0, "12>", {"prompt": "12>", "answer": "21"}, "math", "21", 2, "stop", 1.0, {"right": 1.0}),
        EvaluatedCompletion(1, "34>", fields, "code", "43", 2, "stop", 1.0, {"right": 1.0}),
        EvaluatedCompletion(1, "34>", fields, "code", "4", 1, "length", 0.0, {"right": 0.0}),
    ]


def test_finished_evaluation_waits_for_no_function_and_rows_keep_their_order(release: threading.Event) -> None:
    def waits(completions: Sequence[EvaluatedCompletion]) -> dict[str, float]:
        release.wait()
        return {"number": len(completions)}

    bench = Bench(waits)
    bench.numbers.finish(row(10), ROLLOUTS)
    bench.numbers.finish(row(20), {})
    assert bench.rows == []
    release.set()
    bench.numbers.close()
    assert bench.evaluations() == [(10, {"number": 3.0}), (20, {"number": 0.0})]


def test_function_that_hangs_costs_its_numbers_and_no_row(release: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    def hangs(completions: Sequence[EvaluatedCompletion]) -> dict[str, float]:
        release.wait()
        return {"late": 1.0}

    bench = Bench(hangs, limit_s=0.05)
    bench.numbers.finish(row(10), ROLLOUTS)
    bench.numbers.finish(row(20), ROLLOUTS)
    bench.numbers.close()
    assert bench.evaluations() == [(10, {}), (20, {})]
    first, second = bench.events()
    assert first.endswith("version 10 has no numbers of evaluation.function: the function took more than 0.05 s")
    assert second.endswith("the function's call for an earlier evaluation has not ended yet")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_function_that_fails_once_is_called_for_the_next_evaluation() -> None:
    def once(completions: Sequence[EvaluatedCompletion]) -> dict[str, float]:
        if not completions:
            raise SettingError("evaluation.function", "mine:once", "it raised KeyError: 'x'", "Correct the function.")
        return {"number": 3.0}

    bench = Bench(once)
    bench.numbers.finish(row(10), {})
    bench.numbers.finish(row(20), ROLLOUTS)
    bench.numbers.close()
    assert bench.evaluations() == [(10, {}), (20, {"number": 3.0})]
    (event,) = bench.events()
    assert event.endswith("evaluation.function = \"mine:once\": it raised KeyError: 'x'. Correct the function.")


def test_named_numbers_are_floats_and_may_be_none() -> None:
    completions = [EvaluatedCompletion(0, "12>", {}, "", "21", 2, "stop", 1.0, {})]
    assert load_evaluation("evaluation_functions:good")(completions) == {"number": 1.0, "share": 1.0}
    assert load_evaluation("evaluation_functions:nothing")(completions) == {}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number", "it returned float"),
        ("nan", "it returned nan for 'share', which is no finite number"),
        ("text", "it returned '0.5' for 'share', which is no finite number"),
        ("name", "not accepted"),
        ("many", "not accepted"),
        ("fails", "it raised ZeroDivisionError"),
        ("leaves", "it raised SystemExit"),
    ],
)
def test_function_without_named_numbers_is_the_users_mistake(name: str, words: str) -> None:
    with pytest.raises(SettingError) as raised:
        load_evaluation(f"evaluation_functions:{name}")([])
    assert words in str(raised.value)
    assert raised.value.setting == "evaluation.function"


def test_function_with_other_parameters_is_refused() -> None:
    with pytest.raises(SettingError, match=r"cannot take \(completions\)"):
        load_evaluation("evaluation_functions:two")


def test_example_counts_digits_in_their_place_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "own_evaluation")
    row = {"prompt": "123>", "answer": "321"}
    texts = ("321", "123", "32", "")
    completions = [EvaluatedCompletion(0, "123>", row, "", text, len(text), "stop", 0.0, {}) for text in texts]
    # Right are 3 digits, the middle one, 2, and none.
    assert load_evaluation("own_numbers:digits")(completions) == {"digits_right": 6 / 12, "copies": 0.25}
