import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from offbeat.learner.objectives.advantages import (
    discounted_returns,
    generalized_advantages,
    group_advantages,
    lambda_by_length,
    merge_moments,
    moments,
    rewards_by_token,
    turn_advantages,
    whiten,
)

# A token that was sampled, one that was not (a tool's, or padding).
T, F = True, False


def case(seed: int, rows: int = 3, tokens: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards, values and a mask in float64: a ragged row with a tool's tokens inside, and one without loss tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, tokens, generator=generator) < 0.6
    mask[0, 6:] = False
    mask[-1] = False
    rewards = torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    values = torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    return rewards, values, mask


def with_garbage(tensor: Tensor, mask: Tensor) -> Tensor:
    """Put nan and the infinities where the mask is False."""
    garbage = torch.tensor([math.nan, math.inf, -math.inf], dtype=tensor.dtype)
    return torch.where(mask, tensor, garbage.repeat(tensor.numel())[: tensor.numel()].view_as(tensor))


# Advantages of turns.


def returns_of(*rewards: list[float]) -> list[Tensor]:
    """Return the undiscounted returns-to-go of episodes with these rewards of turns."""
    return [torch.tensor(one, dtype=torch.float64).flip(0).cumsum(0).flip(0) for one in rewards]


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        # Returns 3, 2, 2 and 4.5, 2.5, the last of these held for a third turn: means 3.75, 2.25, 2.25.
        ("group", [[-0.75, -0.25, -0.25], [0.75, 0.25]]),
        # Above the return of the other one alone.
        ("leave_one_out", [[-1.5, -0.5, -0.5], [1.5, 0.5]]),
        ("zero", [[3.0, 2.0, 2.0], [4.5, 2.5]]),
    ],
)
def test_turn_is_compared_with_the_returns_of_others_from_the_same_turn_on(baseline, expected):
    advantages = turn_advantages(returns_of([1.0, 0.0, 2.0], [2.0, 2.5]), baseline=baseline)
    assert [one.tolist() for one in advantages] == expected


@settings(max_examples=25)
@given(rewards=st.lists(st.floats(-5, 5), min_size=1, max_size=5), data=st.data())
def test_turns_of_episodes_with_a_reward_at_the_end_alone_have_the_advantage_of_the_episode(rewards, data):
    lengths = [data.draw(st.integers(1, 4)) for _ in rewards]
    returns = returns_of(*[[0.0] * (length - 1) + [reward] for length, reward in zip(lengths, rewards, strict=True)])
    of_episodes = group_advantages(torch.tensor(rewards, dtype=torch.float64), divide_by_std=False)
    for of_turns, of_episode in zip(turn_advantages(returns, baseline="group"), of_episodes, strict=True):
        torch.testing.assert_close(of_turns, of_episode.expand_as(of_turns))


@pytest.mark.parametrize(("baseline", "factor"), [("group", 0.5), ("leave_one_out", 1.0), ("zero", 1.0)])
def test_expected_gradient_of_turns_is_that_of_the_expected_reward(baseline, factor):
    """Enumerate all groups of two episodes of a game in which each turn stops it or goes on, with a reward for each."""
    logit = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    # Stopping at turn t earns 2 - t; going on earns 0.3, 0.9 and at the end 4.
    games = [[2.0], [0.3, 1.0], [0.3, 0.9, 0.0], [0.3, 0.9, 4.0]]
    actions = [[1], [0, 1], [0, 0, 1], [0, 0, 0]]
    logprobs = []
    for of_game in actions:
        stops = torch.tensor(of_game, dtype=torch.float64)
        chosen = logit[: len(of_game)]
        logprobs.append(stops * torch.nn.functional.logsigmoid(chosen) + (1 - stops) * torch.nn.functional.logsigmoid(-chosen))
    chances = torch.stack([one.sum().exp() for one in logprobs])
    expected = chances @ torch.tensor(list(map(sum, games)), dtype=torch.float64)
    (true_gradient,) = torch.autograd.grad(expected, logit, retain_graph=True)
    surrogate = torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(range(len(games)), repeat=2):
        advantages = turn_advantages(returns_of(*[games[index] for index in pair]), baseline=baseline)
        score = sum((one * logprobs[index]).sum() for one, index in zip(advantages, pair, strict=True))
        surrogate = surrogate + (chances[pair[0]] * chances[pair[1]]).detach() * score / 2
    (gradient,) = torch.autograd.grad(surrogate, logit)
    torch.testing.assert_close(gradient, factor * true_gradient)


# Group advantages.


def test_advantages_are_centered_and_divided_by_the_unbiased_standard_deviation():
    # Rewards 0, 0, 0, 4: mean 1, squares 1 + 1 + 1 + 9 = 12, std sqrt(12 / 3) = 2.
    advantages = group_advantages(torch.tensor([0.0, 0.0, 0.0, 4.0]), divide_by_std=True, epsilon=0.0)
    torch.testing.assert_close(advantages, torch.tensor([-0.5, -0.5, -0.5, 1.5]))


def test_epsilon_is_added_to_the_standard_deviation():
    # Std 2, epsilon 2: half of what it is without.
    advantages = group_advantages(torch.tensor([0.0, 0.0, 0.0, 4.0]), divide_by_std=True, epsilon=2.0)
    torch.testing.assert_close(advantages, torch.tensor([-0.25, -0.25, -0.25, 0.75]))


def test_without_std_only_the_mean_is_subtracted():
    advantages = group_advantages(torch.tensor([0.0, 0.0, 0.0, 4.0]), divide_by_std=False)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, -1.0, -1.0, 3.0]))


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # Others of 1: (2 + 6) / 2 = 4; of 2: 3.5; of 6: 1.5.
    advantages = group_advantages(torch.tensor([1.0, 2.0, 6.0]), baseline="leave_one_out", divide_by_std=False)
    torch.testing.assert_close(advantages, torch.tensor([-3.0, -1.5, 4.5]))


def test_leave_one_out_divides_by_the_standard_deviation_of_all():
    # Rewards 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, std sqrt(7) = 2.6457513.
    advantages = group_advantages(torch.tensor([1.0, 2.0, 6.0]), baseline="leave_one_out", divide_by_std=True, epsilon=0.0)
    torch.testing.assert_close(advantages, torch.tensor([-1.1338934, -0.5669467, 1.7008401]))


def test_without_a_baseline_the_rewards_are_the_advantages():
    rewards = torch.tensor([0.0, 0.0, 0.0, 4.0])
    assert torch.equal(group_advantages(rewards, baseline="zero", divide_by_std=False), rewards)
    divided = group_advantages(rewards, baseline="zero", divide_by_std=True, epsilon=0.0)
    torch.testing.assert_close(divided, torch.tensor([0.0, 0.0, 0.0, 2.0]))


def test_each_group_is_its_own_baseline():
    rewards = torch.tensor([[0.0, 1.0], [10.0, 12.0]])
    torch.testing.assert_close(group_advantages(rewards, divide_by_std=False), torch.tensor([[-0.5, 0.5], [-1.0, 1.0]]))


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_advantages_of_exactly_zero(baseline, divide_by_std, dtype):
    rewards = torch.full((2, 7), 0.1, dtype=dtype)
    assert (rewards.mean(dim=-1) != rewards[:, 0]).all(), "the case must have a mean that is not the number"
    advantages = group_advantages(rewards, baseline=baseline, divide_by_std=divide_by_std)
    assert torch.equal(advantages, torch.zeros(2, 7, dtype=dtype))


def test_equal_rewards_without_a_baseline_are_not_divided():
    rewards = torch.tensor([0.1, 0.1, 0.1])
    assert torch.equal(group_advantages(rewards, baseline="zero", divide_by_std=True), rewards)


@pytest.mark.parametrize(("baseline", "advantage"), [("group", 0.0), ("leave_one_out", 0.0), ("zero", 3.0)])
@pytest.mark.parametrize("divide_by_std", [True, False])
def test_a_group_of_one_has_nothing_to_be_compared_with(baseline, advantage, divide_by_std):
    rewards = torch.tensor([[3.0], [3.0]])
    advantages = group_advantages(rewards, baseline=baseline, divide_by_std=divide_by_std)
    assert torch.equal(advantages, torch.full((2, 1), advantage))


@given(
    rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=6),
    shift=st.floats(-10, 10),
    baseline=st.sampled_from(["group", "leave_one_out"]),
    divide_by_std=st.booleans(),
)
@settings(max_examples=60)
def test_neither_a_shift_nor_the_order_of_the_group_changes_an_advantage(rewards, shift, baseline, divide_by_std):
    group = torch.tensor(rewards, dtype=torch.float64)
    advantages, shifted, flipped = (
        group_advantages(rewards, baseline=baseline, divide_by_std=divide_by_std, epsilon=1e-3)
        for rewards in (group, group + shift, group.flip(0))
    )
    torch.testing.assert_close(shifted, advantages, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(flipped, advantages.flip(0), rtol=1e-9, atol=1e-9)
    assert advantages.sum().item() == pytest.approx(0.0, abs=1e-9)


# Rewards of tokens.


def test_the_reward_is_on_the_last_loss_token_and_the_kl_on_every_one():
    rewards = rewards_by_token(
        torch.tensor([2.0, -1.0, 5.0]),
        torch.tensor([[0.1, math.nan, 0.3, -0.2, math.inf], [0.5, math.nan, -math.inf, 0.0, 0.0], [1.0] * 5]),
        torch.tensor([[T, F, T, T, F], [T, F, F, F, F], [F, F, F, F, F]]),
        kl_coefficient=0.5,
    )
    # The last row has no loss token for its reward.
    expected = [[-0.05, 0.0, -0.15, 2.1, 0.0], [-1.25, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(rewards, torch.tensor(expected))


def test_a_reward_has_no_gradient():
    token_kl = torch.ones(1, 2, requires_grad=True)
    assert not rewards_by_token(torch.ones(1), token_kl, torch.tensor([[T, T]]), kl_coefficient=1.0).requires_grad


# Returns.


def test_returns_skip_what_was_not_sampled():
    # From the end: 4; 2 + 0.5 * 4 = 4 across the two tokens of a tool; 1 + 0.5 * 4 = 3.
    returns = discounted_returns(
        torch.tensor([[1.0, 2.0, math.nan, math.inf, 4.0, -math.inf]]), torch.tensor([[T, T, F, F, T, F]]), gamma=0.5
    )
    assert torch.equal(returns, torch.tensor([[3.0, 4.0, 0.0, 0.0, 4.0, 0.0]]))


def test_without_discounting_returns_are_what_is_still_to_come():
    returns = discounted_returns(torch.tensor([[0.0, -1.0, 0.0, 3.0]]), torch.tensor([[T, T, T, T]]), gamma=1.0)
    assert torch.equal(returns, torch.tensor([[2.0, 2.0, 3.0, 3.0]]))


def test_at_a_discount_of_zero_a_return_is_the_tokens_own_reward():
    returns = discounted_returns(torch.tensor([[1.0, 2.0, 7.0]]), torch.tensor([[T, F, T]]), gamma=0.0)
    assert torch.equal(returns, torch.tensor([[1.0, 0.0, 7.0]]))


@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 37), gamma=st.floats(0, 1))
@settings(max_examples=40)
def test_returns_equal_a_loop_over_the_sampled_tokens(seed, tokens, gamma):
    rewards, _, mask = case(seed, tokens=tokens)
    expected = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        sampled = [token for token in range(tokens) if mask[row, token]]
        for index, token in enumerate(sampled):
            for distance, later in enumerate(sampled[index:]):
                expected[row, token] += gamma**distance * rewards[row, later]
    returns = discounted_returns(with_garbage(rewards, mask), mask, gamma=gamma)
    torch.testing.assert_close(returns, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(returns[~mask], torch.zeros_like(returns[~mask]))


# Generalized advantages.


def test_generalized_advantages_of_two_tokens_around_a_tools():
    # The last: delta 1 - 0.5 = 0.5, after it nothing. The first: delta 0 + 0.5 * 0.5 - 0.25 = 0, advantage 0 + 0.5 * 0.5 * 0.5.
    advantages, returns = generalized_advantages(
        torch.tensor([[0.0, math.nan, 1.0, math.nan]]),
        torch.tensor([[0.25, math.inf, 0.5, math.nan]]),
        torch.tensor([[T, F, T, F]]),
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert torch.equal(advantages, torch.tensor([[0.125, 0.0, 0.5, 0.0]]))
    assert torch.equal(returns, torch.tensor([[0.375, 0.0, 1.0, 0.0]]))


@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 37), gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
@settings(max_examples=40)
def test_generalized_advantages_equal_a_loop_over_the_sampled_tokens(seed, tokens, gamma, gae_lambda):
    rewards, values, mask = case(seed, tokens=tokens)
    expected = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        next_value, next_advantage = 0.0, 0.0
        for token in reversed([token for token in range(tokens) if mask[row, token]]):
            delta = rewards[row, token] + gamma * next_value - values[row, token]
            next_advantage = delta + gamma * gae_lambda * next_advantage
            next_value = values[row, token]
            expected[row, token] = next_advantage
    advantages, returns = generalized_advantages(
        with_garbage(rewards, mask), with_garbage(values, mask), mask, gamma=gamma, gae_lambda=gae_lambda
    )
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0), rtol=1e-12, atol=1e-12)
    assert torch.equal(returns[~mask], torch.zeros_like(returns[~mask]))


@given(seed=st.integers(0, 10**6), gamma=st.floats(0, 1))
@settings(max_examples=25)
def test_at_lambda_one_they_are_returns_less_values_and_at_zero_one_step_errors(seed, gamma):
    rewards, values, mask = case(seed)
    monte_carlo = discounted_returns(rewards, mask, gamma=gamma)
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=gamma, gae_lambda=1.0)
    torch.testing.assert_close(returns, monte_carlo, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(advantages, torch.where(mask, monte_carlo - values, 0.0), rtol=1e-12, atol=1e-12)
    advantages, _ = generalized_advantages(rewards, torch.zeros_like(values), mask, gamma=gamma, gae_lambda=0.0)
    assert torch.equal(advantages, torch.where(mask, rewards, 0.0))


def test_targets_have_a_lambda_of_their_own():
    rewards, values, mask = case(seed=2)
    both = {"gamma": 0.9, "gae_lambda": 0.3}
    advantages, returns = generalized_advantages(rewards, values, mask, **both, target_lambda=1.0)
    assert torch.equal(advantages, generalized_advantages(rewards, values, mask, **both)[0])
    torch.testing.assert_close(returns, discounted_returns(rewards, mask, gamma=0.9), rtol=1e-12, atol=1e-12)


def test_lambda_by_length_counts_the_sampled_tokens_of_each_row():
    mask = torch.tensor([[T, F, T, F], [T, F, F, F], [T, T, T, T], [F, F, F, F]])
    lambdas = lambda_by_length(mask)
    torch.testing.assert_close(lambdas, torch.tensor([[2 / 3], [1 / 3], [5 / 6], [0.0]]))
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.0] * 4])
    advantages, _ = generalized_advantages(rewards, torch.zeros(4, 4), mask, gamma=1.0, gae_lambda=lambdas)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([2 / 3, 1.0, (5 / 6) ** 3, 0.0]))


def test_a_perfect_critic_leaves_no_advantage():
    rewards, _, mask = case(seed=1)
    values = discounted_returns(rewards, mask, gamma=0.9)
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.9, gae_lambda=0.7)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(returns, values, rtol=1e-12, atol=1e-12)


def test_the_critics_target_has_no_gradient():
    values = torch.ones(1, 2, requires_grad=True)
    results = generalized_advantages(torch.ones(1, 2), values, torch.tensor([[T, T]]), gamma=1.0, gae_lambda=1.0)
    assert not any(result.requires_grad for result in results)


def test_padding_and_the_order_of_rows_change_nothing():
    rewards, values, mask = case(seed=2)
    advantages, _ = generalized_advantages(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
    wide_advantages, _ = generalized_advantages(
        pad(rewards.flip(0), (0, 9), value=math.nan),
        pad(values.flip(0), (0, 9), value=7.0),
        pad(mask.flip(0), (0, 9), value=False),
        gamma=0.9,
        gae_lambda=0.8,
    )
    torch.testing.assert_close(wide_advantages[:, :11], advantages.flip(0), rtol=1e-12, atol=1e-12)
    assert torch.equal(wide_advantages[:, 11:], torch.zeros(3, 9, dtype=torch.float64))


# Whitening.


def test_whitened_advantages_have_mean_zero_and_unbiased_variance_one():
    # Loss tokens 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, variance 7.
    advantages = torch.tensor([[1.0, math.nan, 2.0], [6.0, math.inf, -math.inf]])
    mask = torch.tensor([[T, F, T], [T, F, F]])
    measured = moments(advantages, mask)
    assert measured.tolist() == [3.0, 3.0, 14.0]
    assert measured.dtype == torch.float64
    root = math.sqrt(7)
    whitened = whiten(advantages, mask, measured, epsilon=0.0)
    torch.testing.assert_close(whitened, torch.tensor([[-2 / root, 0.0, -1 / root], [3 / root, 0.0, 0.0]]))
    # Epsilon 2 makes the root that of 9.
    whitened = whiten(advantages, mask, measured, epsilon=2.0)
    torch.testing.assert_close(whitened, torch.tensor([[-2 / 3, 0.0, -1 / 3], [1.0, 0.0, 0.0]]))


def test_moments_of_parts_merge_into_those_of_the_whole():
    # 1, 2 (mean 1.5, squares 0.5), 6 (mean 6, squares 0) and nothing: 0.5 + 2 * 1.5**2 + 0 + 3**2 = 14.
    parts = torch.tensor([[2.0, 1.5, 0.5], [1.0, 6.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert merge_moments(parts).tolist() == [3.0, 3.0, 14.0]


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12),
    cut=st.integers(0, 12),
    far=st.sampled_from([0.0, 1e4]),
)
@settings(max_examples=60)
def test_moments_may_be_merged_from_any_split(values, cut, far):
    whole = torch.tensor([values], dtype=torch.float64) + far
    parts = [moments(part, torch.ones_like(part, dtype=torch.bool)) for part in (whole[:, :cut], whole[:, cut:])]
    merged = merge_moments(torch.stack(parts))
    count, mean, squares = merged.tolist()
    assert count == len(values)
    assert mean == pytest.approx(whole.mean().item(), rel=1e-12, abs=1e-12)
    assert squares == pytest.approx((whole - whole.mean()).square().sum().item(), rel=1e-9, abs=1e-9)


def test_moments_keep_their_digits_far_from_zero():
    # The variance of 1e8 + 0, 1, 2 is 1; a sum of squares near 3e16 has a resolution of 4.
    advantages = torch.tensor([[1e8, 1e8 + 1, 1e8 + 2]], dtype=torch.float64)
    assert moments(advantages, torch.tensor([[T, T, T]])).tolist() == [3.0, 1e8 + 1, 2.0]


def test_equal_advantages_become_zero_not_noise():
    advantages, mask = torch.full((7, 3), 0.1), torch.ones(7, 3, dtype=torch.bool)
    assert whiten(advantages, mask, moments(advantages, mask)).abs().max() < 1e-9


@pytest.mark.parametrize("mask", [[[F, F]], [[F, T]]])
def test_fewer_than_two_loss_tokens_keep_their_advantages(mask):
    advantages, mask = torch.tensor([[math.nan, 5.0]]), torch.tensor(mask)
    whitened = whiten(advantages, mask, moments(advantages, mask))
    assert whitened.tolist() == [[0.0, 5.0 if mask[0, 1] else 0.0]]


def test_the_moments_are_of_all_ranks_though_one_has_a_single_token():
    # Two ranks, one loss token each: 1 and 3, mean 2, variance 2.
    ranks = [(torch.tensor([[1.0]]), torch.tensor([[T]])), (torch.tensor([[3.0]]), torch.tensor([[T]]))]
    merged = merge_moments(torch.stack([moments(*rank) for rank in ranks]))
    whitened = [whiten(*rank, merged, epsilon=0.0).item() for rank in ranks]
    assert whitened == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])
