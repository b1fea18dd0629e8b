"""Advantages of the completions of a group: how much better each was than its siblings."""

from torch import Tensor


def group_advantages(rewards: Tensor, *, divide_by_std: bool, epsilon: float = 1e-6) -> Tensor:
    """`A_i = (R_i - mean_j R_j) / (std_j R_j + epsilon)`; without `divide_by_std` the numerator alone (Dr. GRPO).

    The last dimension of `rewards` is the group: the completions of one prompt. The standard deviation is the unbiased
    one, as in most implementations of GRPO (https://arxiv.org/abs/2402.03300) and GSPO
    (https://arxiv.org/abs/2507.18071, eq. 6); `epsilon` is not in the papers. Returns the shape and dtype of `rewards`.

    A group whose rewards are all equal, or of one completion, has advantages of exactly 0.
    """
    centered = rewards - rewards.mean(dim=-1, keepdim=True)
    # The mean of equal numbers is not always that number: dividing the rounding error by epsilon would make noise loud.
    all_equal = rewards.amax(dim=-1, keepdim=True) == rewards.amin(dim=-1, keepdim=True)
    centered = centered.masked_fill(all_equal, 0.0)
    if not divide_by_std or rewards.shape[-1] == 1:
        return centered
    return centered / (rewards.std(dim=-1, keepdim=True) + epsilon)
