"""Metrics of a mixture-of-experts model's routing: between two versions or two services, and within one pass.

`experts` is `[tokens, layers, top_k]`, integers: the experts that a token went to in a layer, distinct, in any order. Two such
tensors have the same tokens, layers and `top_k`.
"""

import math

import torch
from torch import Tensor

MARGIN_PERCENTILES = (5, 25, 50)
"""Percentiles of `margin_metrics`; low ones, because tokens with a small margin are the ones that change experts."""


def routing_metrics(experts: Tensor, other_experts: Tensor) -> dict[str, float]:
    """Compare the expert sets `E(t, l)` of size K from two sources a, b; equal sets give an `overlap` of 1 and 0 elsewhere.

        overlap            mean over (t, l) of |E_a & E_b| / K
        changed_slots      1 - overlap
        router_mismatch    mean over (t, l) of 1[E_a != E_b]
        token_any          mean over t of 1[E_a(t, l) != E_b(t, l) for some l]
        routers_per_token  mean over t of sum_l 1[E_a != E_b]

    `changed_slots` is what GSPO reports as about 10 % after each gradient update of a 48-layer model (section 5.3 of
    https://arxiv.org/abs/2507.18071); the last three are about 10 %, 94 % and 6 between engine and trainer in R3
    (https://arxiv.org/abs/2510.11370).
    """
    # Compared, not counted: `other_experts` may come from another machine, and ids that no expert has must match nothing.
    is_shared = (experts[..., :, None] == other_experts[..., None, :]).any(dim=-1)
    is_changed = ~is_shared.all(dim=-1)
    overlap = is_shared.double().mean().item()
    return {
        "overlap": overlap,
        "changed_slots": 1.0 - overlap,
        "router_mismatch": is_changed.double().mean().item(),
        "token_any": is_changed.any(dim=-1).double().mean().item(),
        "routers_per_token": is_changed.sum(dim=-1).double().mean().item(),
    }


def load_metrics(experts: Tensor, *, num_experts: int) -> dict[str, float]:
    """Measure the balance of a layer's `num_experts` experts, as means over the layers.

        load_max_over_mean  max_e n_e / mean_e n_e, n_e the tokens that went to expert e: 1 when even, `num_experts / K` at most
        load_entropy        -sum_e p_e log p_e / log num_experts, p_e = n_e / sum n: 1 when even, 0 when one expert has all

    With few tokens for many experts even a uniform router's load looks uneven: compare values of the same number of tokens.
    """
    of_layer = experts.transpose(0, 1).flatten(start_dim=1)
    counts = torch.zeros(len(of_layer), num_experts, dtype=torch.float64)
    counts.scatter_add_(1, of_layer, torch.ones_like(of_layer, dtype=torch.float64))
    shares = counts / counts.sum(dim=-1, keepdim=True)
    return {
        "load_max_over_mean": (shares.amax(dim=-1) * num_experts).mean().item(),
        "load_entropy": (torch.special.entr(shares).sum(dim=-1) / math.log(num_experts)).mean().item(),
    }


def margin_metrics(margins: Tensor) -> dict[str, float]:
    """Return percentiles of the logit gap at the top-K boundary over all tokens and layers; `margins` `[tokens, layers]`."""
    # The next lower value, not an interpolation: where every expert is active the gap is infinite.
    values = margins.flatten().float()
    quantiles = torch.tensor([percentile / 100 for percentile in MARGIN_PERCENTILES])
    found = torch.quantile(values, quantiles, interpolation="lower").tolist()
    return {f"margin_p{percentile}": value for percentile, value in zip(MARGIN_PERCENTILES, found, strict=True)}
