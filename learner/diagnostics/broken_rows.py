"""Completions with broken log-probs, which a step leaves out: they have no loss and no gradient, and are counted by reason.

Their rows still count in the denominators of the step, like completions that a correction drops: the others weigh what they
would weigh beside them.
"""

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from offbeat.learner.diagnostics.group_metrics import Metrics
from offbeat.learner.diagnostics.row_statistics import Column
from offbeat.learner.objectives.losses import LOG_RATIO_BOUND
from offbeat.learner.objectives.objective import PolicyLogprobs


class Broken(IntEnum):
    """The reason why a completion is left out."""

    NOT_AT_ALL = 0
    NOT_FINITE = 1
    """A log-prob of a loss token is nan or infinite, under any of the policies."""
    RATIO = 2
    """A loss token is more than e^`LOG_RATIO_BOUND` times as likely under the policy as under the anchor. Below the bound the
    gradient of such a token dominates a step, where A < 0 and nothing clips it; above, it would vanish without a word."""


def find_broken(logprobs: PolicyLogprobs, completion_mask: Tensor) -> Tensor:
    """Return the `Broken` of each row, `[rows]` int64; log-probs may hold any value outside the mask."""
    policy, anchor = logprobs.policy.detach(), logprobs.anchor
    finite = policy.isfinite() & logprobs.behavior.isfinite() & anchor.isfinite()
    is_finite = (finite | ~completion_mask).all(dim=-1)
    is_bounded = ~(completion_mask & (policy - anchor > LOG_RATIO_BOUND)).any(dim=-1)
    reasons = torch.where(is_bounded, Broken.NOT_AT_ALL.value, Broken.RATIO.value)
    return torch.where(is_finite, reasons, Broken.NOT_FINITE.value)


def broken_metrics(table: Tensor, lease_ids: Sequence[int]) -> Metrics:
    """Count the broken completions of an optimizer step by reason, and by the lease of their group if there are any.

    `table`: `row_statistics` of the step; `lease_ids`: of its groups, in order.
    """
    reasons = table[:, Column.BROKEN].long()
    counts: Metrics = {
        "broken/not_finite": int((reasons == Broken.NOT_FINITE).sum()),
        "broken/ratio": int((reasons == Broken.RATIO).sum()),
    }
    groups = table[reasons != Broken.NOT_AT_ALL][:, Column.GROUP].long().tolist()
    if groups:
        counts["broken/leases"] = {str(lease_ids[group]): count for group, count in sorted(Counter(groups).items())}
    return counts
