"""The publisher's memory of each actor: the version sent, the failures, the time until which updates leave the actor out."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.common.weights.flat import WRONG_CHECKSUM

LONGEST_EXCLUSION_S = 60.0
"""Longest exclusion, and the time without a failure after which earlier failures are forgotten."""


class Recipient(NamedTuple):
    """A live actor, to which weights are sent."""

    peer: bytes
    """Its address at the hub; a restarted actor has another."""
    name: str
    policy_version: int | None
    """The version that it committed; None when it has no weights of this learner process that it may use. The roster's copy."""
    gpu: str | None = None
    """UUID of the GPU on which it would receive a collective; None when its engine has none."""


@dataclass
class ActorVersion:
    """One actor, since it joined."""

    sent_version: int | None = None
    """Newest version that was broadcast to it, or that it pulled."""
    sent_at: float = 0.0
    needs_pull: bool = False
    """True when it has failed since its last commit."""
    num_breaks: int = 0
    """Collectives in a row that broke for it."""
    num_failures: int = 0
    """Exclusions in a row."""
    excluded_until: float = 0.0
    why: str | None = None
    """Name and reason of the last failure."""


class ActorVersions:
    """The actor_versions of all live actors. Not thread-safe: the publisher holds its lock."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Give actors `timeout_s` to commit what they were sent."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._by_peer = defaultdict[bytes, ActorVersion](ActorVersion)
        self._eligible: Set[bytes] = frozenset()
        """Actors that the collective can reach; the others always pull."""
        self._has_anyone_weights = False
        """True when a live actor has weights of this learner process. A new one then pulls and keeps nobody waiting."""
        self._news: list[tuple[str, str, float]] = []

    @property
    def num_excluded(self) -> int:
        """Actors that are left out now."""
        now = self._clock()
        return sum(actor.excluded_until > now for actor in self._by_peer.values())

    def forget(self, peer: bytes) -> None:
        """Forget an actor that is new or came back: nothing that it was sent before counts."""
        self._by_peer.pop(peer, None)

    def settle(self, recipients: Sequence[Recipient], newest: int, eligible: Set[bytes]) -> None:
        """Forget the actors that left, and forgive those that have committed what they were sent.

        `eligible` are the actors that the collective can reach now.
        """
        self._eligible = eligible
        self._has_anyone_weights = any(recipient.policy_version is not None for recipient in recipients)
        for peer in self._by_peer.keys() - {recipient.peer for recipient in recipients}:
            del self._by_peer[peer]
        for recipient in recipients:
            actor = self._by_peer[recipient.peer]
            sent = newest if actor.sent_version is None else min(newest, actor.sent_version)
            if recipient.policy_version is not None and recipient.policy_version >= sent:
                actor.needs_pull = False
                actor.num_breaks = 0

    def behind(self, recipients: Iterable[Recipient], newest: int, *, by_pull: bool) -> list[Recipient]:
        """Return the actors that need the newest weights now, by pull or collective.

        They are not those left out, nor those about to commit.
        """
        return [
            one
            for one in recipients
            if self._is_behind(one, newest) and not self._is_awaited(one, newest) and self._must_pull(one) is by_pull
        ]

    def lacking(self, recipients: Iterable[Recipient], newest: int) -> list[Recipient]:
        """Return the actors that lack the newest version, and are not left out."""
        return [one for one in recipients if self._is_behind(one, newest)]

    def is_eligible(self, recipient: Recipient) -> bool:
        """Return whether the collective can reach this actor now."""
        return recipient.peer in self._eligible

    def exclude_late(self, recipients: Iterable[Recipient], newest: int) -> None:
        """Exclude the actors that have not committed in time what they were sent."""
        deadline = self._clock() - self._timeout_s
        for recipient in recipients:
            actor = self._by_peer[recipient.peer]
            is_awaited = self._is_behind(recipient, newest) and self._is_awaited(recipient, newest)
            if is_awaited and actor.sent_at < deadline:
                why = f"did not commit version {actor.sent_version} within {self._timeout_s:g} s (weights.timeout_s)"
                self.exclude(recipient.peer, recipient.name, why)

    def note_break(self, recipient: Recipient, error: str, newest: int) -> bool:
        """Note that a collective broke for an actor; return whether it may take part in the next one.

        A member that leaves or dies amid a transfer breaks it for those behind it too, which are not to blame. So an actor
        is excluded at its second break in a row, or when it alone can be at fault.
        """
        if not self._is_behind(recipient, newest):
            return False
        actor = self._by_peer[recipient.peer]
        actor.num_breaks += 1
        if actor.num_breaks > 1 or self._must_pull(recipient) or error.startswith(WRONG_CHECKSUM):
            self.exclude(recipient.peer, recipient.name, f"could not take the weights: {error}")
            return False
        actor.sent_version = None
        return True

    def note_sent(self, peer: bytes, policy_version: int) -> None:
        """Note that an actor has the bytes of this version, and should commit it."""
        actor = self._by_peer[peer]
        actor.sent_version, actor.sent_at = policy_version, self._clock()

    def exclude(self, peer: bytes, name: str, why: str) -> None:
        """Leave an actor out of updates for a while, twice as long each time in a row; afterwards it pulls."""
        now = self._clock()
        actor = self._by_peer[peer]
        if now - actor.excluded_until > LONGEST_EXCLUSION_S:
            actor.num_failures = 0
        actor.num_failures += 1
        actor.sent_version = None
        actor.needs_pull = True
        seconds = min(LONGEST_EXCLUSION_S, 2.0**actor.num_failures)
        actor.excluded_until = now + seconds
        actor.why = f"{name} {why}"
        self._news.append((name, why, seconds))

    def take_news(self) -> list[tuple[str, str, float]]:
        """Return name, reason and seconds of each exclusion since the last call."""
        news, self._news = self._news, []
        return news

    def problems(self) -> list[str]:
        """Return a line for each actor that is left out."""
        now = self._clock()
        return [
            f"{actor.why}; no weights for another {actor.excluded_until - now:.0f} s"
            for actor in self._by_peer.values()
            if actor.excluded_until > now
        ]

    def _is_behind(self, recipient: Recipient, newest: int) -> bool:
        """Return whether the actor lacks the newest version, and is not left out."""
        has_newest = recipient.policy_version is not None and recipient.policy_version >= newest
        return not has_newest and self._by_peer[recipient.peer].excluded_until <= self._clock()

    def _is_awaited(self, recipient: Recipient, newest: int) -> bool:
        """Return whether the actor has to commit what it was sent before it can be sent more."""
        sent = self._by_peer[recipient.peer].sent_version
        if sent is None or (recipient.policy_version is not None and recipient.policy_version >= sent):
            return False
        return sent == newest or self._must_pull(recipient)

    def _must_pull(self, recipient: Recipient) -> bool:
        actor = self._by_peer[recipient.peer]
        has_nothing = recipient.policy_version is None and actor.sent_version is None
        return not self.is_eligible(recipient) or actor.needs_pull or (has_nothing and self._has_anyone_weights)
