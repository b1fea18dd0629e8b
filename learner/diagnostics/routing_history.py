"""The routing of the canary by policy version, and the changes that an update, staleness and the engine make to it."""

from collections import defaultdict

import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.common.models.routing import Routing
from offbeat.learner.diagnostics.lag_buckets import lag_bucket
from offbeat.learner.diagnostics.routing_metrics import load_metrics, margin_metrics, routing_metrics

MAX_VERSIONS = 33
"""Versions kept; one of Qwen3-30B-A3B takes 200 KB."""


class RoutingHistory:
    """The newest `max_versions` routings of the same tokens. One thread adds; any thread may call `engine_metrics`."""

    def __init__(self, max_versions: int = MAX_VERSIONS) -> None:
        self._max_versions = max_versions
        self._routings: dict[int, Routing] = {}

    def add(self, policy_version: int, routing: Routing) -> None:
        """Keep the routing of the learner's model under this version, which is newer than those before."""
        self._routings[policy_version] = routing
        if len(self._routings) > self._max_versions:
            del self._routings[next(iter(self._routings))]

    def metrics(self) -> dict[str, float]:
        """Compute metrics of the newest version, and of its distance from older ones; empty before the first version.

        `routing/load_*`, `routing/margin_*`: see `load_metrics` and `margin_metrics`. `routing/update_*`: `routing_metrics`
        against the version kept before, `routing/update_steps` optimizer steps older (1 unless `weights.interval` is larger).
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
        return _named("engine_", routing_metrics(routing.experts, _tensor(experts)))


def _tensor(experts: NDArray) -> Tensor:
    # Copied: arrays from the wire are read-only views.
    return torch.from_numpy(experts.astype("int64"))


def _named(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"routing/{prefix}{name}": value for name, value in metrics.items()}
