"""The samples among a run's rows: which steps, which completions, and how long their texts may be."""

from collections.abc import Sequence

import numpy as np
import pytest

from offbeat.common.records.rows import EvalSampleRow, Row, SampleRow
from offbeat.learner.diagnostics.sample_rows import (
    MAX_TEXT,
    NUM_SAMPLED_STEPS,
    EvaluationSampleRows,
    SampleRows,
    shorten,
    written,
)
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.learner.leases.prompts import Prompt
from offbeat.protocols.payload import Segment, Turn


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def group(lease_id: int, rewards: list[float], texts: list[str], version: int = 0) -> Group:
    rollouts = tuple(
        Rollout(
            np.array([ord(letter) for letter in text], np.int32),
            np.zeros(len(text), np.float32),
            reward,
            "length" if len(text) > 2 else "stop",
            (Segment(version, 0),),
        )
        for reward, text in zip(rewards, texts, strict=True)
    )
    return Group(lease_id, lease_id + 100, np.array([ord("p")], np.int32), rollouts, "actor", 0.0)


def samples_of(num_steps: int, versions: Sequence[int], groups: list[Group]) -> list[SampleRow]:
    rows: list[Row] = []
    samples = SampleRows(num_steps, decode, rows.append)
    for version in versions:
        samples.record(groups, version)
    return [row for row in rows if isinstance(row, SampleRow)]


def test_what_an_environment_added_is_marked() -> None:
    ids = np.array(list(map(ord, "?a?c!7")), np.int32)
    rollout = Rollout(ids, np.zeros(6, np.float32), 1.0, "stop", (Segment(0, 0),))
    assert written(rollout, decode) == "?a?c!7"
    turns = (Turn(0, 2), Turn(1, 2), Turn(2, 2))
    rollout = rollout._replace(turns=turns, context_ids=np.array(list(map(ord, "c7.")), np.int32))
    assert written(rollout, decode) == "?a⟦c⟧?c⟦7.⟧!7"
    rewarded = rollout._replace(turns=(turns[0], Turn(1, 2, 1, 0.5), Turn(2, 2, 1, -1.0)))
    assert written(rewarded, decode) == "?a⟦c⟧?c⟦reward 0.5⟧⟦7.⟧!7⟦reward -1⟧"
    # No context before a turn: the model spoke twice in a row.
    rollout = rollout._replace(turns=(Turn(1, 4), Turn(0, 2)), context_ids=np.array([ord("c")], np.int32))
    assert written(rollout, decode) == "⟦c⟧?a?c!7"


def test_where_the_sequences_of_an_episode_begin_is_told() -> None:
    ids = np.array(list(map(ord, "abcde")), np.int32)
    turns = (Turn(0, 1), Turn(1, 1), Turn(0, 1, 2), Turn(2, 1, 0), Turn(0, 1, 5))
    context = np.array(list(map(ord, "x12")), np.int32)
    rollout = Rollout(ids, np.zeros(5, np.float32), 1.0, "stop", (Segment(0, 0),), {}, turns, context)
    assert written(rollout, decode).splitlines() == [
        "a⟦x⟧b",
        "⟦turn 3, from the end of turn 1⟧",
        "c",
        "⟦turn 4, a new sequence⟧",
        "⟦12⟧d",
        "⟦turn 5, from the prompt⟧",
        "e",
    ]


def test_a_sampled_step_has_its_best_and_its_worst_completion() -> None:
    groups = [group(1, [0.5, 2.0], ["ab", "abc"], version=3), group(2, [1.0, -1.0], ["x", "y"], version=4)]
    best, worst = samples_of(5, [5], groups)
    assert (best.reward, best.above_mean, best.completion, best.finish_reason, best.policy_lag) == (
        2.0,
        0.75,
        "abc",
        "length",
        1,
    )
    assert (worst.reward, worst.above_mean, worst.completion, worst.finish_reason, worst.policy_lag) == (-1, -1, "y", "stop", 0)
    assert (worst.prompt, worst.prompt_id, worst.lease_id, worst.num_tokens, worst.policy_version) == ("p", 102, 2, 1, 5)


def test_steps_are_sampled_evenly_with_the_first_and_the_last() -> None:
    versions = [row.policy_version for row in samples_of(112, range(1, 113), [group(1, [0.0], ["a"])])]
    # Every 5th of 112, which makes 22: every 4th would make 28.
    assert versions == [1, *range(5, 111, 5), 112]


@pytest.mark.parametrize("num_steps", [1, 25, 26, 49, 74, 99, 1000])
def test_no_more_steps_are_sampled_than_meant_besides_the_first_and_the_last(num_steps: int) -> None:
    versions = {row.policy_version for row in samples_of(num_steps, range(1, num_steps + 1), [group(1, [0.0], ["a"])])}
    assert {1, num_steps} <= versions
    assert len(versions - {1, num_steps}) <= NUM_SAMPLED_STEPS


def test_long_texts_lack_their_middle() -> None:
    (row,) = samples_of(1, [1], [group(1, [0.0], ["a" * 5000 + "z"])])
    assert row.completion == f"{'a' * 1000} [... 3,001 characters left out ...] {'a' * 999}z"
    assert shorten("a" * MAX_TEXT, MAX_TEXT) == "a" * MAX_TEXT


def evaluated(num_prompts: int, data_set: str = "") -> list[EvalSampleRow]:
    rows: list[Row] = []
    samples = EvaluationSampleRows(num_prompts, decode, rows.append)
    for prompt_id in range(num_prompts):
        prompt = Prompt(prompt_id, "", np.array([ord("p")], np.int32), "{}", data_set=data_set)
        samples.record(prompt, group(0, [0.25], ["abc"]).rollouts[0], 40)
    return [row for row in rows if isinstance(row, EvalSampleRow)]


def test_evaluation_samples_are_of_eight_prompts_spread_evenly() -> None:
    assert [row.prompt_id for row in evaluated(64)] == [0, 8, 16, 24, 32, 40, 48, 56]
    assert [row.prompt_id for row in evaluated(3)] == [0, 1, 2]
    assert evaluated(0) == []


def test_evaluation_sample_has_the_completion_with_its_version_and_set() -> None:
    (row,) = evaluated(1, "math")
    assert (row.policy_version, row.data_set, row.prompt, row.completion) == (40, "math", "p", "abc")
    assert (row.reward, row.finish_reason, row.num_tokens) == (0.25, "length", 3)
    assert evaluated(1)[0].data_set is None
