"""A round of evaluation ends in the mean reward, pass@k without bias, and the mean of each named set."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from offbeat.common.settings.config import DataSection
from offbeat.learner.leases.evaluation import Round, pass_at_k
from offbeat.learner.leases.groups import Rollout
from offbeat.learner.leases.prompts import MAX_LEASE_ATTEMPTS, Prompt, load_held_out


def rollouts(rewards: Sequence[float]) -> tuple[Rollout, ...]:
    token_ids = np.array([7, 7], dtype=np.int32)
    logprobs = np.zeros(2, dtype=np.float32)
    return tuple(
        Rollout(token_ids=token_ids, behavior_logprobs=logprobs, segments=(), finish_reason="stop", reward=reward)
        for reward in rewards
    )


def finished(rewards: Sequence[Sequence[float]]) -> Round:
    round_ = Round(4, list(range(len(rewards))))
    for lease_id, of_prompt in enumerate(rewards):
        round_.next_prompt(lease_id)
        round_.complete(lease_id, rollouts(of_prompt))
    return round_


@pytest.mark.parametrize(("num_completions", "num_passed"), [(1, 0), (1, 1), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_one_that_passes(num_completions: int, num_passed: int) -> None:
    passed = [index < num_passed for index in range(num_completions)]
    for k in range(1, num_completions + 1):
        choices = [any(choice) for choice in combinations(passed, k)]
        assert pass_at_k(num_completions, num_passed, k) == pytest.approx(sum(choices) / len(choices))


def test_row_has_the_mean_reward_and_pass_at_each_power_of_two() -> None:
    row = finished([[1, 0, 0, 0], [1, 1, 1, 1], [0.5, 0, 0, 0]]).row(["", "", ""], pass_reward=1.0)
    assert row.reward == pytest.approx(5.5 / 12)
    # One of four completions: 1 of 4 draws, and 3 of 6 pairs, has it.
    assert row.pass_at == pytest.approx({"1": (0.25 + 1 + 0) / 3, "2": (0.5 + 1 + 0) / 3, "4": (1 + 1 + 0) / 3})
    assert row.sets == {}


def test_reward_from_which_a_prompt_is_solved_is_a_setting() -> None:
    assert finished([[0.5], [0.4]]).row(["", ""], pass_reward=0.5).pass_at == {"1": 0.5}


def test_named_sets_have_their_own_means() -> None:
    row = finished([[1.0], [0.0], [1.0]]).row(["math", "math", "code"], pass_reward=1.0)
    assert row.sets == {"code": 1.0, "math": 0.5}
    assert row.reward == pytest.approx(2 / 3)


def test_failed_prompts_are_in_no_mean() -> None:
    round_ = Round(0, [0, 1])
    round_.next_prompt(0)
    round_.next_prompt(1)
    round_.complete(1, rollouts([1.0]))
    round_.fail(0)
    for _ in range(MAX_LEASE_ATTEMPTS - 1):
        round_.next_prompt(0)
        round_.fail(0)
    row = round_.row(["math", "code"], pass_reward=1.0)
    assert (row.num_failed, row.pass_at, row.sets) == (1, {"1": 1.0}, {"code": 1.0})


@pytest.mark.parametrize(
    ("eval_data", "expected"),
    [
        ("", []),
        ("m.jsonl", [(0, "m.jsonl-0", ""), (1, "m.jsonl-1", "")]),
        (
            {"math": "m.jsonl", "code": "c.jsonl"},
            [(0, "m.jsonl-0", "math"), (1, "m.jsonl-1", "math"), (2, "c.jsonl-0", "code"), (3, "c.jsonl-1", "code")],
        ),
    ],
)
def test_first_prompts_of_each_set_are_held_out(eval_data: str | dict[str, str], expected: list[tuple[int, str, str]]) -> None:
    settings: list[str] = []

    def load(setting: str, source: str) -> list[Prompt]:
        settings.append(setting)
        return [Prompt(index, f"{Path(source).name}-{index}", np.zeros(1, dtype=np.int32), "{}") for index in range(3)]

    prompts = load_held_out(DataSection(eval_data=eval_data), 2, load)
    assert [(prompt.prompt_id, prompt.text, prompt.data_set) for prompt in prompts] == expected
    assert settings == ([f"data.eval_data.{name}" for name in eval_data] if isinstance(eval_data, dict) else settings)
