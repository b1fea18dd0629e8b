"""Aggregation: the weight of each token and each completion in the loss of an optimizer step.

`aggregate` sums over a micro-batch, and the caller divides by `denominator`, counted over the whole global batch (all
micro-batches and ranks), so the split into micro-batches changes nothing. With n the loss tokens of a completion, m those of
all completions of its prompt, N the completions, M the loss tokens and P the prompts of the global batch, the weights in the
gradient are

| mode                       | of a token  | of a completion |                                                             |
|----------------------------|-------------|-----------------|-------------------------------------------------------------|
| `token-mean`               | `1 / M`     | `n / M`         | DAPO, https://arxiv.org/abs/2503.14476                      |
| `prompt-mean-token-mean`   | `1 / (P m)` | `n / (P m)`     | ScaleRL, https://arxiv.org/abs/2510.13786: prompts alike    |
| `seq-mean-token-mean`      | `1 / (N n)` | `1 / N`         | GRPO, GSPO, SAPO: completions weigh alike at any length     |
| `seq-mean-token-sum`       | `1 / N`     | `n / N`         | the plain policy gradient, which grows with the length      |
| `seq-mean-token-sum-norm`  | `1 / (N L)` | `n / (N L)`     | Dr. GRPO, https://arxiv.org/abs/2503.20783, L constant      |

Some popular code divides the last one by the padded width of each micro-batch, and not by N. Under `losses.gspo` the tokens
of a completion share its gradient equally, whatever their own weights.

Completions without loss tokens count in N: they were sampled, and without them the weight of the others would depend on how
often the policy says nothing. Tokens that a correction dropped count in n and M: see `learner.objectives.corrections`.

A micro-batch need not hold all completions of a prompt, so the caller puts the `1 / m` of `prompt-mean-token-mean` into
`row_weights`.

`row_weights` multiply the weight of a completion and enter no denominator: a weight of 1/2 halves the completion's gradient
and leaves the others unchanged, in every mode. The result is a weighted mean if the weights average 1, over completions, or
over tokens under `token-mean`.
"""

from typing import assert_never

import torch
from torch import Tensor

from offbeat.common.settings.objectives import Aggregation


def aggregate(token_values: Tensor, completion_mask: Tensor, row_weights: Tensor, *, mode: Aggregation) -> Tensor:
    """`sum_i row_weights_i sum_t token_values_it`, with a mean over t under `seq-mean-token-mean`: a scalar, differentiable.

    `token_values`: `[rows, tokens]`, any value outside `completion_mask`; `row_weights`: `[rows]`. The caller divides the
    micro-batch's sum by `denominator`.
    """
    row_sums = torch.where(completion_mask, token_values, 0.0).sum(dim=-1)
    if mode == "seq-mean-token-mean":
        row_sums = row_sums / completion_mask.sum(dim=-1).clamp(min=1)
    return (row_weights * row_sums).sum()


def denominator(mode: Aggregation, *, num_groups: int, num_rows: int, num_tokens: int, length: int | None) -> float:
    """Return the divisor of `aggregate` summed over the global batch; at least 1.

    `num_groups`: prompts of the global batch; `num_rows`: its completions, empty ones included; `num_tokens`: its loss tokens;
    `length`: the constant L of `seq-mean-token-sum-norm`, such as the longest completion allowed; None for the other modes.
    """
    match mode:
        case "token-mean":
            count = num_tokens
        case "prompt-mean-token-mean":
            count = num_groups
        case "seq-mean-token-mean" | "seq-mean-token-sum":
            count = num_rows
        case "seq-mean-token-sum-norm":
            assert length is not None, "the constant length is filled in"
            count = num_rows * length
        case _:
            assert_never(mode)
    return float(max(1, count))
