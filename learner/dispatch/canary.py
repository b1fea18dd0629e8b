"""The canary: one fixed sequence of tokens that shows whether an actor samples with the weights that it reports.

training thread: add(version, the learner's log-probs)
hub's thread:    joined(actor), measure_floor(actor, log-probs under the model's files), judge(version, log-probs)

A token must miss twice to count, because numerics strike single tokens hard, and wrong weights strike again. The sequence is
the beginning of the prompts, then the same tokens in reverse order, so that each token is predicted in two contexts: it counts
with the smaller of the two differences. So nearly all wrong weights are confirmed before the actor samples anything under them,
and no group waits for a later comparison. A single token that is off in one context only (one row of the vocabulary) is
confirmed by the same token under the next version; meanwhile the actor's last good version stays the one before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.common.records.rows import CanaryRow, EventRow, Recorder

HIGH = 0.95
"""Share of the tokens whose difference is at most `CanaryDifference.high`."""
FACTOR = 4.0
"""Multiple of the floor from which on a difference is wrong."""


class CanaryDifference(NamedTuple):
    """Statistics of the differences `d_t` of tokens `t`, in nats; also their floor and their limits."""

    mean: float
    """`sum d_t / num_tokens`. Large where all tokens are off, as with other weights."""
    high: float
    """The 95% quantile: the smallest `d` that `HIGH` of the tokens do not exceed. Large where some tokens are off."""
    largest: float
    """`max d_t`. Large where a single token is off, as with one wrong row of the vocabulary."""


LEAST = {"float32": CanaryDifference(5e-5, 2e-4, 1e-3), "bfloat16": CanaryDifference(0.01, 0.05, 0.6)}
"""Limits of an engine without noise, by the dtype of the weights. A small or lucky floor does not lower them."""
MOST = {"float32": CanaryDifference(3e-3, 8e-3, 3e-2), "bfloat16": CanaryDifference(0.2, 0.5, 4.0)}
"""Limits that no floor raises, by the dtype of the weights. They hold for quantized engines and mixtures of experts too."""


def measure(differences: NDArray[np.floating]) -> CanaryDifference:
    """Return the statistics of finite differences `[tokens]`, at least one, none of them negative."""
    ordered = np.sort(differences)
    high = ordered[math.ceil(HIGH * len(ordered)) - 1]
    return CanaryDifference(float(ordered.mean()), float(high), float(ordered[-1]))


def limits_of(floor: CanaryDifference, dtype: str) -> CanaryDifference:
    """Return `min(MOST, max(LEAST, FACTOR * floor))`, statistic by statistic."""
    bounds = zip(floor, LEAST[dtype], MOST[dtype], strict=True)
    return CanaryDifference(*(min(most, max(least, FACTOR * measured)) for measured, least, most in bounds))


def excess_of(difference: CanaryDifference, limits: CanaryDifference) -> float:
    """Return the largest ratio of a statistic to its limit: above 1, numerics do not explain the difference."""
    return max(measured / limit for measured, limit in zip(difference, limits, strict=True))


CANARY_TOKENS = 128
"""Most tokens, those in reverse order included."""
CANARY_VERSIONS = 64
"""Published versions whose log-probs are kept for actors that answer late."""
MAX_ACTORS = 4096
"""Actors that are remembered; one that is forgotten gets another floor at its next comparison."""


class CanaryVerdict(NamedTuple):
    """The judgement on an actor's log-probs of the canary."""

    flaw: str | None
    """The reason why the actor cannot have the weights that it reports; None when its log-probs are right."""
    agrees_with: tuple[str, ...] = ()
    """Other actors whose log-probs of the newest version are wrong, and differ from this one's by no more than noise."""
    is_certain: bool = True
    """False where a token missed once: the next version confirms or refutes it."""


class _Scored(NamedTuple):
    """An actor's comparison with the learner under one version."""

    policy_version: int
    differences: NDArray[np.float32]
    """`[tokens - 1]`, in nats."""


@dataclass
class _Known:
    """The record of one actor since it joined."""

    floor: CanaryDifference | None = None
    """Its difference to the learner under weights that both surely have; the largest one since then."""
    latest: _Scored | None = None
    before: _Scored | None = None
    """The last comparison under another version than `latest`."""

    def note(self, scored: _Scored) -> None:
        """Remember a comparison. One under the same weights replaces the last: it repeats its noise."""
        if self.latest is not None and self.latest.policy_version != scored.policy_version:
            self.before = self.latest
        self.latest = scored


class Canary:
    """Keeps the learner's scores of the canary by policy version, and compares the engines' with them."""

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        *,
        dtype: str,
        file_logprobs: NDArray[np.float32],
        tolerance: Callable[[], float | None],
        record: Recorder,
    ) -> None:
        """
        Args:
            token_ids: The canary, `[tokens]`, as `canary_token_ids` makes it.
            dtype: torch dtype of the weights without its prefix.
            file_logprobs: The learner's log-probs of the canary under the model's files, `[tokens - 1]`, in nats.
            tolerance: Returns the largest difference of a log-prob that is no flaw, in nats, or None where the measured noise
                decides; it may change during the run.
            record: Writes a metrics row.
        """
        self.token_ids = token_ids
        self._dtype = dtype
        self._file_logprobs = file_logprobs
        self._tolerance = tolerance
        self._record = record
        self._logprobs: dict[int, NDArray[np.float32]] = {}
        self._known: dict[str, _Known] = {}
        """The actors, by name."""
        self._wrong: dict[str, NDArray[np.float32]] = {}
        """Wrong log-probs of the newest version, by actor."""

    def add(self, policy_version: int, logprobs: NDArray[np.float32]) -> None:
        """Keep the learner's own score of a version, newer than those before: `logprobs` `[tokens - 1]`, in nats."""
        self._logprobs[policy_version] = logprobs
        # Replaced, not cleared: the hub's thread may be comparing.
        self._wrong = {}
        if len(self._logprobs) > CANARY_VERSIONS:
            del self._logprobs[next(iter(self._logprobs))]

    def joined(self, actor: str) -> None:
        """Forget what is known of an actor: a new process may have taken its name."""
        self._known.pop(actor, None)

    def measure_floor(self, actor: str, logprobs: NDArray[np.float32]) -> None:
        """Measure an actor's floor from its log-probs under the model's files, which it has loaded as the learner did.

        Files that are not the learner's, or log-probs that are no numbers, give no floor: then its first update does.
        """
        if logprobs.shape == self._file_logprobs.shape and _are_finite(self._file_logprobs, logprobs):
            self._take_floor(actor, np.abs(self._file_logprobs - logprobs), "under the model's files")

    def judge(self, actor: str, policy_version: int, logprobs: NDArray[np.float32]) -> CanaryVerdict | None:
        """Compare an actor's log-probs with the learner's; None when those of this version are not kept.

        An actor without a floor is held to `MOST`, and what it is within that becomes its floor.
        """
        expected = self._logprobs.get(policy_version)
        if expected is None:
            return None
        if expected.shape != logprobs.shape:
            return CanaryVerdict(
                f"it scored {len(logprobs)} tokens of the canary, not {len(expected)}, at version {policy_version}"
            )
        if not _are_finite(expected, logprobs):
            self._record(CanaryRow(actor=actor, policy_version=policy_version, max_abs_diff=np.nan))
            theirs, ours = (np.count_nonzero(~np.isfinite(scored)) for scored in (logprobs, expected))
            return CanaryVerdict(
                f"log-probs of the canary are not finite at version {policy_version}: {theirs} of its {len(logprobs)}, "
                f"{ours} of the learner's"
            )
        scored = _Scored(policy_version, np.abs(expected - logprobs))
        known = self._know(actor)
        known.note(scored)
        if known.floor is None:
            self._take_floor(actor, scored.differences, f"at version {policy_version}")
        limits = self._limits(known)
        whole, confirmed = measure(scored.differences), _confirmed(scored.differences, known.before)
        excess = excess_of(confirmed, limits)
        row = CanaryRow(
            actor=actor,
            policy_version=policy_version,
            max_abs_diff=whole.largest,
            mean_abs_diff=whole.mean,
            high_abs_diff=whole.high,
            excess=excess,
        )
        self._record(row)
        if self._is_right(whole, excess):
            self._wrong.pop(actor, None)
            is_certain = whole.largest <= limits.largest
            if is_certain and known.floor is not None:
                # One comparison may have missed the tail of the noise; `MOST` bounds its growth.
                known.floor = known.floor._replace(largest=max(known.floor.largest, whole.largest))
            return CanaryVerdict(None, is_certain=is_certain)
        flaw = f"its log-probs of the canary differ at version {policy_version} by {self._extent(whole, confirmed, limits)}"
        return CanaryVerdict(flaw, self._compare_wrong(actor, policy_version, logprobs, limits))

    def _know(self, actor: str) -> _Known:
        known = self._known.setdefault(actor, _Known())
        if len(self._known) > MAX_ACTORS:
            del self._known[next(iter(self._known))]
        return known

    def _limits(self, known: _Known) -> CanaryDifference:
        return MOST[self._dtype] if known.floor is None else limits_of(known.floor, self._dtype)

    def _take_floor(self, actor: str, differences: NDArray[np.float32], when: str) -> None:
        """Keep an actor's floor, unless it is beyond `MOST`, and tell it.

        Its quantile and its largest difference are those of all tokens, confirmed or not: few tokens show the tail of the noise
        poorly.
        """
        confirmed = _confirmed(differences, None)
        floor = measure(differences)._replace(mean=confirmed.mean)
        is_noise = excess_of(confirmed, MOST[self._dtype]) <= 1
        if is_noise:
            self._know(actor).floor = floor
        fate = f"the limits are {FACTOR:g} times that, within bounds" if is_noise else "too much for noise: no floor"
        detail = (
            f"{when} its log-probs of the canary differ by {floor.mean:.2g} on average, {floor.high:.2g} at the 95% quantile "
            f"and {floor.largest:.2g} at most; {fate}"
        )
        self._record(EventRow(event="engine_noise", detail=detail, actor=actor))

    def _extent(self, whole: CanaryDifference, confirmed: CanaryDifference, limits: CanaryDifference) -> str:
        tolerance = self._tolerance()
        if tolerance is not None:
            return f"{whole.largest:.2g} (tolerance {tolerance:g})"
        return (
            f"{confirmed.mean:.2g} on average, {confirmed.high:.2g} at the 95% quantile and {confirmed.largest:.2g} at most "
            f"(limits {limits.mean:.2g}, {limits.high:.2g} and {limits.largest:.2g})"
        )

    def _is_right(self, whole: CanaryDifference, excess: float) -> bool:
        """Return whether the setting, or else the limits, allow a difference."""
        tolerance = self._tolerance()
        return excess <= 1 if tolerance is None else whole.largest <= tolerance

    def _compare_wrong(
        self, actor: str, policy_version: int, logprobs: NDArray[np.float32], limits: CanaryDifference
    ) -> tuple[str, ...]:
        """Return the other actors with the same wrong log-probs of the newest version, and remember these."""
        wrong = self._wrong
        if policy_version != max(self._logprobs):
            return ()
        wrong[actor] = logprobs

        def is_alike(others: NDArray[np.float32]) -> bool:
            differences = np.abs(others - logprobs)
            return self._is_right(measure(differences), excess_of(_confirmed(differences, None), limits))

        return tuple(sorted(name for name, others in wrong.items() if name != actor and is_alike(others)))


def _confirmed(differences: NDArray[np.float32], before: _Scored | None) -> CanaryDifference:
    """Return the statistics of the differences that a second comparison confirms, in nats.

    `d_t` of a token is the smaller of its differences in both contexts; the largest is also of tokens that were as far off in
    one context `before`. With `n` tokens before their reverse begins, log-probs `i < n - 1` and `2n - 3 - i` are of the same
    token. The last is of the first token, which has no other: it counts only where the canary is that short.
    """
    forward = len(differences) // 2
    if not forward:
        return measure(differences)
    confirmed = measure(np.minimum(differences[:forward], differences[-2 : -forward - 2 : -1]))
    if before is None:
        return confirmed
    again = float(np.minimum(differences, before.differences).max())
    return confirmed._replace(largest=max(confirmed.largest, again))


def _are_finite(*scores: NDArray[np.float32]) -> bool:
    return all(bool(np.isfinite(score).all()) for score in scores)


def canary_token_ids(prompts: Sequence[NDArray[np.int32]], num_tokens: int) -> NDArray[np.int32]:
    """Return at most `num_tokens` tokens: the first of the prompts' token ids, one prompt after another, and their reverse."""
    length = num_tokens // 2
    # No prompt is empty, so this many hold enough tokens, if there are enough at all.
    found = np.concatenate(prompts[:length])[:length].astype(np.int32)
    return np.concatenate([found, found[::-1]])
