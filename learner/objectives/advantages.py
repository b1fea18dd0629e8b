"""Advantages: the reward of a completion, of a turn, or of a token of one, above a baseline for its expectation."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from offbeat.common.settings.objectives import Baseline

LAMBDA_ALPHA = 1.5
"""The alpha of `lambda_by_length`."""


def group_advantages(
    rewards: Tensor,
    *,
    baseline: Baseline = "group",
    lengths: Tensor | None = None,
    divide_by_std: bool,
    epsilon: float = 1e-6,
) -> Tensor:
    """`A_i = (R_i - b_i) / (std_j R_j + epsilon)`; without `divide_by_std` the numerator alone.

    The last dimension of `rewards` is the group: the completions of one prompt. Returns its shape and dtype. `b_i` is

    - `group`: `mean_j R_j` (GRPO, https://arxiv.org/abs/2402.03300; GSPO, https://arxiv.org/abs/2507.18071, eq. 6; without
      the division Dr. GRPO, https://arxiv.org/abs/2503.20783);
    - `leave_one_out`: the mean over the others, `j != i` (RLOO, https://arxiv.org/abs/2402.14740), which makes the
      numerator `n / (n - 1)` times the former for a group of n;
    - `length_weighted`: `sum_j L_j R_j / sum_j L_j` with the `lengths` L, in tokens and of the shape of `rewards` (OPO,
      https://arxiv.org/abs/2505.23585): the baseline of least variance where the squared gradient of a completion's
      log-likelihood is proportional to its length;
    - `zero` and `critic`: 0.

    The papers do not define their standard deviation and have no epsilon. Most implementations divide the squares by n - 1,
    others by n; their epsilons lie between 1e-6 and 1e-4.

    The advantages of a group of equal rewards, or of one completion, are exactly 0, undivided rewards without a baseline.
    """
    group_size = rewards.shape[-1]
    # The mean of equal numbers is not always that number: divided by epsilon, the rounding error would be amplified.
    all_equal = rewards.amax(dim=-1, keepdim=True) == rewards.amin(dim=-1, keepdim=True)
    advantages = rewards
    if baseline not in ("zero", "critic"):
        subtracted = rewards.mean(dim=-1, keepdim=True)
        if baseline == "length_weighted":
            assert lengths is not None, "a mean weighed by lengths needs them"
            weights = lengths.to(rewards)
            subtracted = (weights * rewards).sum(dim=-1, keepdim=True) / weights.sum(dim=-1, keepdim=True).clamp(min=1)
        advantages = (rewards - subtracted).masked_fill(all_equal, 0.0)
    if group_size == 1:
        return advantages
    if baseline == "leave_one_out":
        advantages = advantages * (group_size / (group_size - 1))
    if not divide_by_std:
        return advantages
    std = rewards.std(dim=-1, keepdim=True, correction=1)
    return torch.where(all_equal, advantages, advantages / (std + epsilon))


@torch.no_grad()
def turn_advantages(returns: Sequence[Tensor], *, baseline: Baseline) -> list[Tensor]:
    """`A_it = G_it - b_it`: the return of turn t of episode i, above that of the group's episodes at the same turn.

    `returns`: for each episode of one group `[num_turns]`: `G_it = sum_{k >= t} r_ik`, undiscounted, to go, or the rewards of
    the turn's own branches (`Rollout.branch_returns`). Episodes may differ in their turns. Returns advantages of these shapes.
    With the baseline `group`, `b_it` is the mean over the group of `G_jt`, where an episode that has ended before turn t stands
    with its last turn; the others are as in `group_advantages`, and `length_weighted` is not for turns.

    This is the return-based advantage of GTPO (https://arxiv.org/abs/2511.14846) and the step advantage of GiGPO
    (https://arxiv.org/abs/2505.10978) with `F_norm = 1`, without their discount. GiGPO compares turns with equal states, GTPO
    those with equal indices, of which the last turn of the longest episode has none: hence the ended episodes. A
    baseline that does not depend on a turn's own tokens leaves the expected gradient as it is, whatever it is made of
    (Greensmith, Bartlett, Baxter 2004); like GRPO's, the mean has a share 1/n of the episode itself, and `leave_one_out` has
    none. Turns are not divided by a standard deviation: one of few turns' small rewards would make them as loud as the others.

    When only the last turns have rewards, all turns of an episode have the advantage of `group_advantages`.
    """
    longest = max(len(of_turns) for of_turns in returns)
    held = torch.stack([torch.cat([one, one[-1:].expand(longest - len(one))]) for one in returns], dim=-1)
    advantages = group_advantages(held, baseline=baseline, divide_by_std=False)
    return [advantages[: len(one), index] for index, one in enumerate(returns)]


@torch.no_grad()
def rewards_by_token(rewards: Tensor, token_kl: Tensor, completion_mask: Tensor, *, kl_coefficient: float) -> Tensor:
    """`r_it = 1[t is the last loss token of row i] R_i - kl_coefficient * token_kl_it`: the KL as a part of the reward.

    As in https://arxiv.org/abs/1909.08593, eq. 2, whose KL is the plain log ratio of policy and reference. `rewards`:
    `[rows]`; `token_kl`: `[rows, tokens]`, any value where the mask is False; `completion_mask`: `[rows, tokens]` bool.
    Returns `[rows, tokens]`, 0 outside the mask, without a gradient. The reward of a row without loss tokens is lost.
    """
    num_tokens_left = completion_mask.flip(-1).cumsum(dim=-1).flip(-1)
    at_last_token = torch.where(num_tokens_left == 1, rewards[:, None], 0.0)
    return torch.where(completion_mask, at_last_token - kl_coefficient * token_kl, 0.0)


@torch.no_grad()
def discounted_returns(token_rewards: Tensor, completion_mask: Tensor, *, gamma: float) -> Tensor:
    """Return-to-go `G_t = r_t + gamma G_{t+1}`, where t + 1 is the next loss token; `G` is 0 after the last one.

    `token_rewards`: `[rows, tokens]`, any value where the mask is False; `completion_mask`: `[rows, tokens]` bool. Returns
    `[rows, tokens]`, 0 outside the mask, without a gradient.

    Tokens outside the mask, such as a tool's output inside a completion, are no actions of the policy: they are neither
    rewarded nor discounted. Some popular code discounts them too, so a long tool output hides the reward behind it.
    """
    return _backward_sums(torch.where(completion_mask, token_rewards, 0.0), completion_mask, decay=gamma)


@torch.no_grad()
def generalized_advantages(
    token_rewards: Tensor,
    values: Tensor,
    completion_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    target_lambda: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages `A_t = delta_t + gamma gae_lambda A_{t+1}` with `delta_t = r_t + gamma V_{t+1} - V_t`; returns `A_t + V_t`.

    Generalized advantage estimation, https://arxiv.org/abs/1506.02438, eq. 16. `t + 1` is the next loss token; other tokens
    are skipped, as in `discounted_returns`. After the last one V and A are 0: a completion that was cut off at its length limit
    counts as ended there. A lambda is one number, or `[rows, 1]`. The returns have `target_lambda` in its place, if given:
    the decoupled estimates of VC-PPO, https://arxiv.org/abs/2503.01491.

    `token_rewards`, `values`: `[rows, tokens]`, any value where the mask is False; `values[t]` is the critic's for the state
    before token t. `completion_mask`: `[rows, tokens]` bool. Both results are `[rows, tokens]`, 0 outside the mask, without
    a gradient; the returns are the critic's target.
    """
    values = torch.where(completion_mask, values, 0.0)
    deltas = token_rewards + gamma * _of_next_loss_token(values, completion_mask) - values
    deltas = torch.where(completion_mask, deltas, 0.0)
    advantages = _backward_sums(deltas, completion_mask, decay=gamma * gae_lambda)
    if target_lambda is None:
        return advantages, advantages + values
    return advantages, _backward_sums(deltas, completion_mask, decay=gamma * target_lambda) + values


def lambda_by_length(completion_mask: Tensor) -> Tensor:
    """`1 - 1 / (1.5 n)` for each completion of n loss tokens, `[rows, 1]`; 0 for one without.

    VAPO, https://arxiv.org/abs/2504.05118, with the alpha of SAO, https://arxiv.org/abs/2607.07508, section 4.1: the reward
    reaches the first token with a weight of about `e^(-2/3)` whatever the length, where a constant lambda loses it.
    """
    return (1 - 1 / (LAMBDA_ALPHA * completion_mask.sum(dim=-1, keepdim=True))).clamp(min=0.0)


def _backward_sums(terms: Tensor, completion_mask: Tensor, *, decay: float | Tensor) -> Tensor:
    """`S_t = terms_t + decay S_{t+1}` over loss tokens; `terms` and the result are 0 outside the mask.

    Takes log2(tokens) steps instead of one per token: after k steps every sum covers 2**k tokens.
    """
    sums = terms
    # Factor of the sum that begins after token t in the sum at t.
    decays = torch.where(completion_mask, decay, torch.ones_like(terms))
    num_tokens = terms.shape[-1]
    reach = 1
    while reach < num_tokens:
        head, last = num_tokens - reach, slice(num_tokens - reach, None)
        sums = torch.cat([sums[:, :head] + decays[:, :head] * sums[:, reach:], sums[:, last]], dim=-1)
        decays = torch.cat([decays[:, :head] * decays[:, reach:], decays[:, last]], dim=-1)
        reach *= 2
    return torch.where(completion_mask, sums, 0.0)


def _of_next_loss_token(values: Tensor, completion_mask: Tensor) -> Tensor:
    """Return at every token the value of the first loss token after it; 0 where there is none."""
    num_tokens = values.shape[-1]
    positions = torch.arange(num_tokens, device=values.device).expand_as(completion_mask)
    # A search that finds no next loss token ends in an extra column of zeros.
    positions = torch.where(completion_mask, positions, num_tokens)
    from_here = pad(positions, (0, 1), value=num_tokens).flip(-1).cummin(dim=-1).values.flip(-1)
    return pad(values, (0, 1)).gather(-1, from_here[:, 1:])


@torch.no_grad()
def moments(advantages: Tensor, completion_mask: Tensor) -> Tensor:
    """Return count, mean and summed squared distance from the mean of the loss tokens' advantages, `[3]` float64.

    `advantages`: `[rows, tokens]`, any value where the mask is False; `completion_mask`: `[rows, tokens]` bool. Without loss
    tokens all three are 0. `merge_moments` combines those of several ranks or micro-batches.
    """
    count = completion_mask.sum()
    values = torch.where(completion_mask, advantages, 0.0).double()
    mean = values.sum() / count.clamp(min=1)
    # Not the sum of squares minus the squared sum: that loses all digits when the mean is far from 0.
    squares = torch.where(completion_mask, values - mean, 0.0).square().sum()
    return torch.stack([count.double(), mean, squares])


def merge_moments(parts: Tensor) -> Tensor:
    """Combine the `moments` of parts, `[parts, 3]`, empty ones included, into those of the whole, `[3]`.

    `n = sum n_k`, `mean = sum n_k mean_k / n`, `squares = sum (squares_k + n_k (mean_k - mean)^2)`.
    """
    counts, means, squares = parts.unbind(dim=-1)
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return torch.stack([count, mean, (squares + counts * (means - mean).square()).sum()])


@torch.no_grad()
def whiten(advantages: Tensor, completion_mask: Tensor, merged_moments: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """`(A - mean) / sqrt(variance + epsilon)` with the mean and the unbiased variance of `merged_moments`.

    `advantages`: `[rows, tokens]`, any value where the mask is False; `completion_mask`: `[rows, tokens]` bool;
    `merged_moments`: `[3]`, of the whole optimizer step. Returns `[rows, tokens]`, 0 outside the mask. Fewer than two loss
    tokens have no variance, and their advantages stay.

    Every token counts once, so long completions dominate the moments. No paper of this field defines this step;
    implementations of PPO have it, with this epsilon inside the root.
    """
    count, mean, squares = merged_moments.tolist()
    if count < 2:
        return torch.where(completion_mask, advantages, 0.0)
    whitened = (advantages.double() - mean) * (squares / (count - 1) + epsilon) ** -0.5
    return torch.where(completion_mask, whitened, 0.0).to(advantages)
