"""Reward functions are found by name, called in the form that their parameters ask for, and their values checked."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from offbeat.actor.rewards.failures import Failure
from offbeat.actor.rewards.functions import Reward, RewardFunction, exact_match, load_reward, math_answer, reward_of, rewards_of
from offbeat.actor.rewards.samples import RewardUnavailable
from offbeat.common.errors import SettingError
from tests.actor.rewards.reward_harness import samples


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


def test_built_in_rewards_are_loaded_by_name():
    assert load_reward("exact_match").function is exact_match
    assert load_reward("math_answer").function is math_answer
    with pytest.raises(SettingError, match=r"no built-in reward 'exact'.*exact_match or math_answer"):
        load_reward("exact")


class Given:
    """Functions of every form, that return what they were given."""

    @staticmethod
    def sample(sample):
        return len(sample.token_ids) + 10 * sample.is_evaluation + 100 * (sample.finish_reason == "length")

    @staticmethod
    def group(group):
        return [max(len(other.completion) for other in group) - len(sample.completion) for sample in group]

    @staticmethod
    def samples(samples):
        return np.array([len(sample.completion) for sample in samples]) / 2

    @staticmethod
    def old(p, c, r):
        return len(p) + len(c) + r["bonus"]


def load_own(monkeypatch: pytest.MonkeyPatch, function: object) -> RewardFunction:
    module = types.ModuleType("own_reward")
    module.__file__ = __file__
    vars(module)["reward"] = function
    monkeypatch.setitem(sys.modules, "own_reward", module)
    return load_reward("own_reward:reward")


@pytest.mark.parametrize(
    ("function", "form", "totals"),
    [
        (Given.old, "completion", [7.0, 8.0]),
        (Given.sample, "sample", [11.0, 12.0]),
        (Given.group, "group", [1.0, 0.0]),
        (Given.samples, "samples", [0.5, 1.0]),
    ],
)
def test_form_follows_from_the_parameters(monkeypatch, function, form, totals) -> None:
    reward = load_own(monkeypatch, function)
    assert reward.form == form
    group = samples(["a", "bb"], {"bonus": 5}, is_evaluation=True)
    assert reward.outcomes(group, {}) == [Reward(total) for total in totals]


@pytest.mark.parametrize("function", [lambda prompt, completion: 0, lambda text: 0, lambda: 0])
def test_other_parameters_are_refused_with_the_forms_there_are(monkeypatch, function) -> None:
    with pytest.raises(SettingError, match=r"cannot take \(prompt, completion, row\).*\(sample\), \(group\), \(samples\)"):
        load_own(monkeypatch, function)


def test_mistakes_and_troubles_of_single_completions_leave_the_others_their_rewards(monkeypatch) -> None:
    def reward(prompt, completion, row):
        if completion == "down":
            raise RewardUnavailable("busy")
        return 1 / len(completion)

    good, down, bad = load_own(monkeypatch, reward).outcomes(samples(["ab", "down", ""]), {})
    assert good == Reward(0.5)
    assert isinstance(down, Failure) and down.is_transient
    assert isinstance(bad, Failure) and not bad.is_transient
    assert bad.detail.startswith("ZeroDivisionError: division by zero (")


def test_parts_are_summed_with_their_weights() -> None:
    assert reward_of({"right": True, "format": 0.5, "length": -2}, {"format": 0.2, "length": 0.0}) == Reward(
        1.1, {"right": 1.0, "format": 0.5, "length": -2.0}
    )
    assert reward_of({}, {}) == Reward(0.0)


@pytest.mark.parametrize(
    ("value", "weights", "words"),
    [
        ("1", {}, "the reward is '1', not a number"),
        (np.array([0.25]), {}, "the reward is array([0.25]), not a number; return its item()"),
        (float("inf"), {}, "the reward is inf, not within 1e+06 of 0"),
        ({"right": None}, {}, "part 'right' of the reward is None, not a number"),
        ({"right": float("nan")}, {}, "part 'right' of the reward is nan"),
        ({"a/b": 1.0}, {}, "named 'a/b'"),
        ({"new\nline": 1.0}, {}, "named 'new"),
        ({1: 1.0}, {}, "named 1"),
        ({str(n): 1.0 for n in range(33)}, {}, "33 parts"),
        ({"right": 1.0}, {"rigth": 2.0}, "task.reward_weights has rigth"),
        (1.0, {"right": 2.0}, "without parts"),
        ({"a": 1e308, "b": 1e308}, {}, "not within 1e+06 of 0"),
    ],
)
def test_what_is_no_reward_is_refused_in_words(value, weights, words) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        reward_of(value, weights)


@pytest.mark.parametrize(
    ("values", "words"),
    [([1.0], "1 rewards for 2 completions"), ("ab", "not a sequence"), (1.0, "not a sequence"), ([1.0, "x"], "not a number")],
)
def test_a_group_needs_one_reward_per_completion(values, words) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        rewards_of(values, 2, {})


@pytest.mark.parametrize(
    ("name", "form", "totals"),
    [("exact", "completion", [1.0, 0.0, 0.0]), ("parts", "sample", [2.0, 1.0, 1.0]), ("rarest", "group", [5 / 3, 0.0, 0.0])],
)
def test_examples_are_rewards(name: str, form: str, totals: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "rewards")
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    reward = load_reward(f"rewards:{name}")
    assert reward.form == form
    outcomes = reward.outcomes(samples(["7", "8", "9"], {"answer": 7}), {})
    assert [outcome.total for outcome in outcomes if isinstance(outcome, Reward)] == pytest.approx(totals)
    assert load_reward("rewards:batched").form == "samples"
    assert load_reward("rewards:judged").is_async
    monkeypatch.delitem(sys.modules, "rewards")
