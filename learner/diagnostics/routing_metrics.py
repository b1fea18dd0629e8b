"""Metrics of a mixture-of-experts model's routing: between two versions or two services, and within one pass.

`experts` is `[tokens, layers, top_k]`, integers: the experts that a token went to in a layer, distinct, in any order. Two such
tensors have the same tokens, layers and `top_k`.
"""

import math
from collections import defaultdict

import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.common.models.routing import Routing
from offbeat.common.records.rows import Recorder, RoutingRow
from offbeat.learner.diagnostics.batch_metrics import lag_bucket

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


MAX_VERSIONS = 33
"""Versions kept; one of Qwen3-30B-A3B takes 200 KB."""


class RoutingComparison:
    """Records how the routing of the canary changes between versions, and how the engines' differs from the learner's.

    It keeps the newest routings of the same tokens. One thread adds; any thread may compare.
    """

    def __init__(self, interval: int, publish_interval: int, record: Recorder, max_versions: int = MAX_VERSIONS) -> None:
        """`interval` is in optimizer steps, 0 for no rows; a version is published every `publish_interval` steps."""
        self._interval = interval
        self._publish_interval = publish_interval
        self._record = record
        self._max_versions = max_versions
        self._routings: dict[int, Routing] = {}

    def add(self, policy_version: int, routing: Routing | None) -> None:
        """Keep the learner's routing under a version, newer than those before; None for a dense model."""
        if routing is None or not self._interval:
            return
        self._routings[policy_version] = routing
        if len(self._routings) > self._max_versions:
            del self._routings[next(iter(self._routings))]
        if self._is_due(policy_version):
            self._record(RoutingRow(policy_version=policy_version, metrics=self.metrics()))

    def compare(self, actor: str, policy_version: int, experts: NDArray) -> None:
        """Record how an engine's routing, `experts` `[tokens, layers, top_k]`, differs from the learner's."""
        if self._is_due(policy_version) and (metrics := self.engine_metrics(policy_version, experts)):
            self._record(RoutingRow(actor=actor, policy_version=policy_version, metrics=metrics))

    def metrics(self) -> dict[str, float]:
        """Compute metrics of the newest version, and of its distance from older ones; empty before the first version.

        `routing/load_*`, `routing/margin_*`: see `load_metrics` and `margin_metrics`. `routing/update_*`: `routing_metrics`
        against the version kept before, `routing/update_steps` optimizer steps older.
        `routing/lag_1_*`, `_2_`, `_3_4_`, `_5_8_`, `_9_up_`: the same against older versions by their lag in steps, means over
        the versions in a bucket. Versions that are not kept have no entry.
        """
        if not self._routings:
            return {}
        (newest, routing), *older = reversed(self._routings.items())
        row = _named("", load_metrics(routing.experts, num_experts=routing.num_experts) | margin_metrics(routing.margins))
        if not older:
            return row
        compared = [(newest - version, routing_metrics(kept.experts, routing.experts)) for version, kept in older]
        lag, update = compared[0]
        row |= {"routing/update_steps": lag, **_named("update_", update)}
        buckets: dict[str, list[dict[str, float]]] = defaultdict(list)
        for lag, metrics in compared:
            buckets[lag_bucket(lag).replace("-", "_").replace("+", "_up")].append(metrics)
        for bucket, members in buckets.items():
            means = {name: sum(member[name] for member in members) / len(members) for name in members[0]}
            row |= _named(f"lag_{bucket}_", means)
        return row

    def engine_metrics(self, policy_version: int, experts: NDArray) -> dict[str, float]:
        """Compute `routing/engine_*`: `routing_metrics` of the learner's model against an engine's under the same version.

        `experts`: integers `[tokens, layers, top_k]` as an actor sent them; ids that no expert has count as different. Returns
        no metrics when the version is not kept, or the shape differs.
        """
        routing = self._routings.get(policy_version)
        if routing is None or routing.experts.shape != experts.shape:
            return {}
        # Copied: arrays from the wire are read-only views.
        copied = torch.from_numpy(experts.astype("int64"))
        return _named("engine_", routing_metrics(routing.experts, copied))

    def _is_due(self, policy_version: int) -> bool:
        """Return whether this is the first version published in its interval."""
        return self._interval > 0 and policy_version % self._interval < self._publish_interval


def _named(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"routing/{prefix}{name}": value for name, value in metrics.items()}
