"""The canary: one fixed sequence of tokens that shows whether an actor samples with the weights that it reports.

training thread: add(version, the learner's log-probs)
hub's thread:    judge(version, an actor's log-probs) -> Verdict
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.common.routing import Routing
from offbeat.common.rows import CanaryRow, Recorder, RoutingRow
from offbeat.learner.diagnostics.routing_history import RoutingHistory

CANARY_TOKENS = 64
CANARY_VERSIONS = 64
"""Published versions whose log-probs are kept for actors that answer late."""


class Verdict(NamedTuple):
    """The judgement on an actor's log-probs of the canary."""

    flaw: str | None
    """The reason why the actor cannot have the weights that it reports; None when its log-probs are right."""
    max_abs_diff: float | None
    """Largest difference to the learner's log-probs, in nats; None when the lengths differ."""
    agrees_with: tuple[str, ...] = ()
    """Other actors whose log-probs of the newest version are wrong, and differ from this one's within the tolerance."""


class Canary:
    """Keeps the learner's scores of the canary by policy version, and compares the engines' with them."""

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        *,
        tolerance: Callable[[], float],
        routing_interval: int,
        publish_interval: int,
        record: Recorder,
    ) -> None:
        """
        Args:
            token_ids: The canary, `[tokens]`.
            tolerance: Returns the largest difference of a log-prob that is no flaw, in nats; it may change during the run.
            routing_interval: Optimizer steps between two comparisons of routing; 0: none.
            publish_interval: Optimizer steps between two published versions.
            record: Writes a metrics row.
        """
        self.token_ids = token_ids
        self._tolerance = tolerance
        self._routing_interval = routing_interval
        self._publish_interval = publish_interval
        self._record = record
        self._logprobs: dict[int, NDArray[np.float32]] = {}
        self._wrong: dict[str, NDArray[np.float32]] = {}
        """Wrong log-probs of the newest version, by actor."""
        self._routings = RoutingHistory()

    def add(self, policy_version: int, logprobs: NDArray[np.float32], routing: Routing | None) -> None:
        """Keep the learner's own score of a version, newer than those before: `logprobs` `[tokens - 1]`, in nats.

        `routing` is None for a dense model.
        """
        self._logprobs[policy_version] = logprobs
        # Replaced, not cleared: the hub's thread may be comparing.
        self._wrong = {}
        if len(self._logprobs) > CANARY_VERSIONS:
            del self._logprobs[next(iter(self._logprobs))]
        if routing is not None and self._routing_interval:
            self._routings.add(policy_version, routing)
            if self._is_routing_due(policy_version):
                self._record(RoutingRow(policy_version=policy_version, metrics=self._routings.metrics()))

    def judge(self, actor: str, policy_version: int, logprobs: NDArray[np.float32]) -> Verdict | None:
        """Compare an actor's log-probs with the learner's; None when those of this version are not kept."""
        expected = self._logprobs.get(policy_version)
        if expected is None:
            return None
        if expected.shape != logprobs.shape:
            flaw = f"it scored {len(logprobs)} tokens of the canary, not {len(expected)}, at version {policy_version}"
            return Verdict(flaw, None)
        max_abs_diff = float(np.abs(expected - logprobs).max())
        self._record(CanaryRow(actor=actor, policy_version=policy_version, max_abs_diff=max_abs_diff))
        # Not `>`: a NaN must not pass.
        if not max_abs_diff <= self._tolerance():
            flaw = (
                f"its log-probs of the canary differ by {max_abs_diff:.2g} at version {policy_version} "
                f"(tolerance {self._tolerance():g})"
            )
            return Verdict(flaw, max_abs_diff, self._compare_wrong(actor, policy_version, logprobs))
        self._wrong.pop(actor, None)
        return Verdict(None, max_abs_diff)

    def _compare_wrong(self, actor: str, policy_version: int, logprobs: NDArray[np.float32]) -> tuple[str, ...]:
        """Return the other actors with the same wrong log-probs of the newest version, and remember these."""
        wrong = self._wrong
        if policy_version != max(self._logprobs):
            return ()
        wrong[actor] = logprobs
        return tuple(
            sorted(
                name
                for name, others in wrong.items()
                if name != actor and float(np.abs(others - logprobs).max()) <= self._tolerance()
            )
        )

    def compare_routing(self, actor: str, policy_version: int, experts: NDArray[Any]) -> None:
        """Record how an engine's routing of the canary, `experts` `[tokens, layers, top_k]`, differs from the learner's."""
        if not self._is_routing_due(policy_version):
            return
        metrics = self._routings.engine_metrics(policy_version, experts)
        if metrics:
            self._record(RoutingRow(actor=actor, policy_version=policy_version, metrics=metrics))

    def _is_routing_due(self, policy_version: int) -> bool:
        """Return whether this is the first version published in its interval."""
        interval = self._routing_interval
        return interval > 0 and policy_version % interval < self._publish_interval


def canary_token_ids(prompts: Sequence[NDArray[np.int32]], num_tokens: int) -> NDArray[np.int32]:
    """Return the first `num_tokens` tokens of the prompts' token ids, one prompt after another.

    A single token is repeated, because the first token of a sequence has no log-prob.
    """
    # No prompt is empty, so this many hold enough tokens, if there are enough at all.
    found = np.concatenate(prompts[:num_tokens])[:num_tokens].astype(np.int32)
    return np.repeat(found, 2) if len(found) == 1 < num_tokens else found
