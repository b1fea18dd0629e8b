import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from offbeat.common.errors import SettingError
from offbeat.common.settings.learning_sections import RewardSection
from offbeat.learner.objectives.reward_shaping import (
    RunningMoments,
    load_length_penalty,
    normalize_rewards,
    overlong_punishment,
    shape_rewards,
)

# Group moments: mean 3, std sqrt((4 + 1 + 9) / 2) = sqrt(7); mean 4, std sqrt((1 + 1 + 4) / 2) = sqrt(3).
# Of all six: mean 3.5, squares 6.25 + 2.25 + 6.25 + 0.25 + 0.25 + 6.25 = 21.5, std sqrt(4.3).
REWARDS = np.array([[1.0, 2.0, 6.0], [3.0, 3.0, 6.0]])
LENGTHS = np.array([[1, 8, 9], [10, 4, 10]])

USER_PENALTIES = """\
import numpy as np

seen = []

def per_token(lengths, max_new_tokens):
    seen.append(lengths.shape)
    penalties = -lengths / max_new_tokens
    lengths[:] = 0
    return penalties

def as_list(lengths, max_new_tokens):
    return [-1] * len(lengths)

def single(lengths, max_new_tokens):
    return -1.0

def not_finite(lengths, max_new_tokens):
    return np.where(lengths > 5, np.nan, 0.0)

def raises(lengths, max_new_tokens):
    raise KeyError("missing")

def words(lengths, max_new_tokens):
    return ["long"] * len(lengths)

number = 3
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a module with a user's length penalties, in the current folder."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "user_penalties.py").write_text(USER_PENALTIES)
    (folder / "broken_penalties.py").write_text("import os\n1 / 0\n")
    before = Path.cwd(), list(sys.path)
    os.chdir(folder)
    yield "user_penalties"
    os.chdir(before[0])
    sys.path[:] = before[1]


def normalized(rewards, mean_of: Any, std_of: Any, epsilon=0.0, running=None):
    return normalize_rewards(rewards, mean_of=mean_of, std_of=std_of, epsilon=epsilon, running=running or RunningMoments())


def shaped(
    rewards=REWARDS,
    *,
    overlong_buffer=0,
    length_penalty=None,
    norm_mean: Any = "none",
    norm_std: Any = "none",
    clip=None,
    running=None,
):
    section = RewardSection(
        overlong_buffer=overlong_buffer, overlong_penalty=2.0, norm_mean=norm_mean, norm_std=norm_std, clip=clip
    )
    running = running or RunningMoments()
    return shape_rewards(rewards, LENGTHS, section, max_new_tokens=10, length_penalty=length_penalty, running=running)


# Normalization.


def test_group_moments_are_each_groups_own():
    expected = [np.array([-2, -1, 3]) / np.sqrt(7), np.array([-1, -1, 2]) / np.sqrt(3)]
    np.testing.assert_allclose(normalized(REWARDS, "group", "group"), expected, rtol=1e-14)


def test_batch_moments_are_of_all_completions():
    expected = np.array([[-2.5, -1.5, 2.5], [-0.5, -0.5, 2.5]]) / np.sqrt(4.3)
    np.testing.assert_allclose(normalized(REWARDS, "batch", "batch"), expected, rtol=1e-14)


def test_running_moments_are_those_given():
    # Mean 1, std sqrt(8 / 2) = 2.
    running = RunningMoments(count=3, mean=1.0, squares=8.0)
    assert normalized(REWARDS, "running", "running", running=running).tolist() == [[0.0, 0.5, 2.5], [1.0, 1.0, 2.5]]
    assert normalized(REWARDS, "running", "none", running=running).tolist() == (REWARDS - 1).tolist()
    assert normalized(REWARDS, "none", "running", running=running).tolist() == (REWARDS / 2).tolist()


def test_a_mean_alone_is_subtracted_and_nothing_divided():
    assert normalized(REWARDS, "group", "none").tolist() == [[-2, -1, 3], [-1, -1, 2]]
    assert normalized(REWARDS, "batch", "none").tolist() == [[-2.5, -1.5, 2.5], [-0.5, -0.5, 2.5]]


def test_a_standard_deviation_alone_divides_and_nothing_is_subtracted():
    expected = [np.array([1, 2, 6]) / np.sqrt(7), np.array([3, 3, 6]) / np.sqrt(3)]
    np.testing.assert_allclose(normalized(REWARDS, "none", "group"), expected, rtol=1e-14)
    np.testing.assert_allclose(normalized(REWARDS, "none", "batch"), REWARDS / np.sqrt(4.3), rtol=1e-14)


def test_mean_and_standard_deviation_may_be_of_different_populations():
    running = RunningMoments(count=3, mean=1.0, squares=8.0)
    of_group, of_batch = np.array([[-2, -1, 3], [-1, -1, 2]]), np.array([[-2.5, -1.5, 2.5], [-0.5, -0.5, 2.5]])
    group_std = np.sqrt([[7.0], [3.0]])
    for mean_of, std_of, expected in (
        ("group", "batch", of_group / np.sqrt(4.3)),
        ("group", "running", of_group / 2),
        ("batch", "group", of_batch / group_std),
        ("batch", "running", of_batch / 2),
        ("running", "group", (REWARDS - 1) / group_std),
        ("running", "batch", (REWARDS - 1) / np.sqrt(4.3)),
    ):
        np.testing.assert_allclose(normalized(REWARDS, mean_of, std_of, running=running), expected, rtol=1e-14)


def test_a_group_of_equal_rewards_is_not_divided_whatever_its_mean_is_of():
    rewards = np.array([[2.0, 2.0], [1.0, 7.0]])
    # Batch: mean 3, squares 1 + 1 + 4 + 16 = 22. Second group: mean 4, squares 9 + 9 = 18.
    np.testing.assert_allclose(normalized(rewards, "batch", "group")[0], [-1.0, -1.0])
    np.testing.assert_allclose(normalized(rewards, "batch", "group")[1], np.array([-2.0, 4.0]) / np.sqrt(18))
    np.testing.assert_allclose(normalized(rewards, "group", "batch"), np.array([[0, 0], [-3, 3]]) / np.sqrt(22 / 3))


def test_epsilon_is_added_to_the_standard_deviation():
    # Rewards -1 and 1: std sqrt(2).
    rewards = np.array([[-1.0, 1.0]])
    np.testing.assert_allclose(normalized(rewards, "batch", "batch", epsilon=1.0), rewards / (np.sqrt(2) + 1), rtol=1e-14)


def test_without_normalization_rewards_are_as_they_were():
    assert normalized(REWARDS, "none", "none").tolist() == REWARDS.tolist()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mean_of", ["group", "batch", "running"])
@pytest.mark.parametrize("std_of", ["none", "group", "batch", "running"])
@pytest.mark.parametrize("shape", [(3, 3), (1, 7), (7, 1)])
def test_equal_rewards_are_shifted_to_exactly_zero_and_never_scaled(mean_of, std_of, shape):
    # Neither three nor seven times 0.1 has a mean of 0.1.
    rewards = np.full(shape, 0.1)
    running = RunningMoments().add(rewards).add(rewards)
    assert not normalized(rewards, mean_of, std_of, 1e-6, running).any()
    assert normalized(rewards, "none", std_of, 1e-6, running).tolist() == rewards.tolist()


def test_a_group_of_equal_rewards_is_zero_beside_one_that_is_not():
    rewards = np.array([[0.1, 0.1, 0.1], [0.0, 0.0, 3.0]])
    result = normalized(rewards, "group", "group")
    assert not result[0].any()
    np.testing.assert_allclose(result[1], np.array([-1, -1, 2]) / np.sqrt(3))


# Eighths: a shift of any floats may round rewards that differ to equal ones, which are not scaled.
EIGHTHS = st.integers(-80, 80).map(lambda number: number / 8)


@given(
    rewards=st_numpy.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(2, 5)), elements=EIGHTHS),
    mean_of=st.sampled_from(["group", "batch"]),
    std_of=st.sampled_from(["none", "group", "batch"]),
    shift=EIGHTHS,
)
@settings(max_examples=60)
def test_neither_a_shift_nor_the_order_changes_a_normalized_reward(rewards, mean_of, std_of, shift):
    result = normalized(rewards, mean_of, std_of, epsilon=1e-3)
    np.testing.assert_allclose(normalized(rewards + shift, mean_of, std_of, epsilon=1e-3), result, atol=1e-9)
    np.testing.assert_allclose(normalized(rewards[::-1, ::-1], mean_of, std_of, epsilon=1e-3), result[::-1, ::-1], atol=1e-9)
    assert np.isfinite(result).all()


# Running moments.


def test_running_moments_of_numbers_one_by_one():
    # 1, then 2, then 6: mean 3, squares 4 + 1 + 9 = 14, std sqrt(14 / 2).
    running = RunningMoments()
    for value in (1.0, 2.0, 6.0):
        running = running.add(np.array([value]))
    assert (running.count, running.mean, running.squares) == pytest.approx((3, 3.0, 14.0))
    assert running.std == pytest.approx(np.sqrt(7))


@given(
    values=st.lists(st.floats(-100, 100), max_size=20),
    cuts=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    far=st.sampled_from([0.0, 1e5]),
)
@settings(max_examples=60)
def test_moments_after_several_updates_equal_those_of_everything_at_once(values, cuts, far):
    everything = np.array(values, dtype=np.float64) + far
    running = RunningMoments()
    for part in np.split(everything, sorted(cuts)):
        running = running.add(part)
    assert running.count == len(values)
    assert running.mean == pytest.approx(everything.mean() if values else 0.0, rel=1e-12, abs=1e-12)
    assert running.std == pytest.approx(everything.std(ddof=1) if len(values) > 1 else 0.0, rel=1e-6, abs=1e-6)


def test_fewer_than_two_rewards_have_no_spread():
    assert RunningMoments().std == 0.0
    assert RunningMoments().add(np.array([5.0])) == RunningMoments(count=1, mean=5.0, squares=0.0)


def test_running_moments_survive_a_checkpoint():
    running = RunningMoments().add(REWARDS)
    assert msgspec.json.decode(msgspec.json.encode(running), type=RunningMoments) == running


# Penalties and the clip.


def test_the_punishment_grows_through_the_buffer_and_is_whole_at_the_limit():
    # Limit 10, buffer 4: nothing up to 6, then a quarter per token.
    lengths = np.array([0, 5, 6, 7, 8, 9, 10])
    punishment = overlong_punishment(lengths, max_new_tokens=10, buffer_tokens=4, penalty=2.0)
    assert punishment.tolist() == [0.0, 0.0, 0.0, -0.5, -1.0, -1.5, -2.0]


def test_a_completion_beyond_the_limit_loses_no_more_than_the_penalty():
    assert overlong_punishment(np.array([15]), max_new_tokens=10, buffer_tokens=4, penalty=2.0).tolist() == [-2.0]


def test_without_a_buffer_nothing_is_punished():
    lengths = np.array([0, 9, 10, 25])
    assert not overlong_punishment(lengths, max_new_tokens=10, buffer_tokens=0, penalty=2.0).any()


def test_clipped_rewards_lie_within_the_limit_on_both_sides():
    assert shaped(np.array([[-9.0, -2.0, 0.5], [3.0, 0.5, 2.0]]), clip=2.0).rewards.tolist() == [
        [-2.0, -2.0, 0.5],
        [2.0, 0.5, 2.0],
    ]


# The whole order.


def test_with_everything_off_rewards_stay():
    result = shaped()
    assert result.rewards.tolist() == REWARDS.tolist()
    assert result.running == RunningMoments()


def test_penalties_are_added_before_normalization():
    # Buffer 2 of limit 10, penalty 2: lengths 9 and 10 lose 1 and 2; the user's takes 1 from every completion longer than 8.
    result = shaped(overlong_buffer=2, length_penalty=lambda lengths, _: -1.0 * (lengths > 8), norm_mean="group")
    # 1, 2, 6 - 1 - 1 = 4: mean 7 / 3. 3 - 2 - 1 = 0, 3, 6 - 3 = 3: mean 2.
    np.testing.assert_allclose(result.rewards, [[-4 / 3, -1 / 3, 5 / 3], [-2.0, 1.0, 1.0]], atol=1e-14)


def test_the_clip_comes_last():
    # Shifted by 3.5: -2.5, -1.5, 2.5, -0.5, -0.5, 2.5. Clipped first they would all be shifted by less than 2.
    result = shaped(norm_mean="batch", clip=2.0)
    assert result.rewards.tolist() == [[-2.0, -1.5, 2.0], [-0.5, -0.5, 2.0]]


def test_running_moments_have_seen_the_step_they_normalize_and_continue():
    result = shaped(norm_mean="running")
    np.testing.assert_allclose(result.rewards, REWARDS - 3.5, rtol=1e-14)
    assert (result.running.count, result.running.mean) == (6, pytest.approx(3.5))
    # Six more, by 7 greater: the mean of all twelve is 7.
    result = shaped(REWARDS + 7, norm_mean="running", running=result.running)
    np.testing.assert_allclose(result.rewards, REWARDS, rtol=1e-13)


def test_running_moments_are_updated_for_either_of_the_two_and_else_left_alone():
    # The first step's: mean 3.5, std sqrt(4.3); each with the other's of the group.
    for_mean, for_std = shaped(norm_mean="running", norm_std="group"), shaped(norm_mean="group", norm_std="running")
    np.testing.assert_allclose(for_mean.rewards, (REWARDS - 3.5) / np.sqrt([[7.0], [3.0]]), rtol=1e-5)
    np.testing.assert_allclose(for_std.rewards, np.array([[-2, -1, 3], [-1, -1, 2]]) / np.sqrt(4.3), rtol=1e-5)
    assert for_mean.running == for_std.running == RunningMoments().add(REWARDS)
    before = RunningMoments(count=3, mean=1.0, squares=8.0)
    assert shaped(norm_mean="group", norm_std="batch", running=before).running == before


def test_running_moments_are_of_rewards_with_penalties():
    running = shaped(norm_mean="running", length_penalty=lambda lengths, _: np.full(lengths.shape, -1.0)).running
    assert running.mean == pytest.approx(2.5)


def test_the_callers_rewards_are_left_alone():
    before = REWARDS.copy()
    shaped(overlong_buffer=4, norm_mean="batch", norm_std="batch", clip=1.0)
    assert np.array_equal(before, REWARDS)


# The user's length penalty.


def test_the_users_function_gets_all_lengths_in_one_array_and_cannot_change_them(module):
    before = LENGTHS.copy()
    result = shaped(length_penalty=load_length_penalty(f"{module}:per_token"))
    np.testing.assert_allclose(result.rewards, REWARDS - LENGTHS / 10)
    assert sys.modules[module].seen == [(6,)]
    assert np.array_equal(before, LENGTHS)


def test_a_list_of_numbers_will_do(module):
    assert load_length_penalty(f"{module}:as_list")(np.array([3, 4]), 10).tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("single", r"shape \(\) for lengths of the shape \(2,\)"),
        ("not_finite", "returned nan for a completion of 7 tokens"),
        ("raises", r"raised KeyError: 'missing' \(.*user_penalties.py:21\)"),
        ("words", "could not convert string to float"),
    ],
)
def test_a_wrong_result_names_the_setting(module, function, message):
    length_penalty = load_length_penalty(f"{module}:{function}")
    with pytest.raises(SettingError, match=f"reward.length_penalty.*{function}.*{message}"):
        length_penalty(np.array([4, 7]), 10)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:function", "there is no module 'no_such_module'"),
        ("broken_penalties:function", r"ZeroDivisionError: division by zero \(.*broken_penalties.py:2\)"),
        ("user_penalties:missing", "user_penalties.py has no 'missing'"),
        ("user_penalties:number", "'number' is of type int"),
    ],
)
def test_a_function_that_is_not_there_names_the_setting(module, path, message):
    with pytest.raises(SettingError, match=f"reward.length_penalty.*{path}.*{message}"):
        load_length_penalty(path)
