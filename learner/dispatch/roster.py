"""The live actors: who is here, when each was last heard, and which weights each has."""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from offbeat.common.records.rows import ActorRow, CommitRow, EventRow, Recorder
from offbeat.common.settings.config import HubSection
from offbeat.learner.dispatch.contract import Contract, differences, objection, source_objection
from offbeat.learner.dispatch.reports import Rejections, report
from offbeat.learner.dispatch.run_state import Versions
from offbeat.learner.dispatch.send_queue import SendQueue
from offbeat.protocols import messages
from offbeat.protocols.keys import Sender
from offbeat.protocols.text import plain

MemberMessage = (
    messages.Credit
    | messages.GroupDone
    | messages.LeaseFailed
    | messages.ActorHeartbeat
    | messages.WeightsStaged
    | messages.WeightsCommitted
    | messages.CanaryScored
    | messages.FilesScored
    | messages.CanaryRouted
    | messages.Goodbye
    | messages.ChunkRequest
)
"""The messages of an actor after its hello."""

TROUBLE_REPORTED_AFTER_S = 5.0
"""Seconds for which rewards must be failing at an actor before that is an event: a busy judge is nothing unusual."""
MAX_ACTOR_ROWS_PER_S = 50
"""Rows about all actors together: 1,000 actors, however idle, wrote 0.2 MB each second with a row at each heartbeat."""
REPEATED_HELLO_S = 0.5
"""Seconds after a welcome in which the same hello again was under way already: an actor that waits says it every second."""
MAX_BARRED = 1000
"""Replaced and dismissed actor processes that are remembered, to refuse them when they come back."""


OFTEN_LOST = 3
"""Losses of an actor for its silence from which on something is wrong with it, rather than with one moment."""
OFTEN_LOST_S = 600.0
MAX_LOST = 1000
"""Names whose losses are remembered."""


class Mismatch(NamedTuple):
    """A comparison in which an actor's log-probs of the canary were wrong."""

    flaw: str
    """The reason why they are wrong."""
    agrees_with: tuple[str, ...] = ()
    """Other actors whose log-probs are wrong too, and the same as this one's."""


@dataclass(eq=False)
class Member:
    """One actor between its hello and its end."""

    peer: bytes
    """Its address at the hub."""
    hello: messages.Hello
    """Its first hello."""
    last_heard: float
    """Time of its last message, on the dispatcher's clock."""
    welcomed_at: float = -math.inf
    """Time of the last welcome, on the same clock."""
    welcomed_with: tuple[int, ...] = ()
    """The leases that its hello before that welcome listed."""
    key_name: str = "*"
    """The name (or pattern) that its key is listed under."""
    capacity: int = 0
    """Leases that it is willing to hold at once."""
    policy_version: int | None = None
    """The newest version it has committed since it joined; weights from before may be of another learner process."""
    good_version: int | None = None
    """The newest version under which its log-probs of the canary were right for certain."""
    mismatches: list[Mismatch] = field(default_factory=list)
    """Wrong log-probs of the canary since its last right ones, oldest first; at most `MAX_MISMATCHES` are kept."""
    quarantines: list[bool] = field(default_factory=list)
    """The latest comparisons of the canary, oldest first: True for one that began a quarantine. At most `RECENT` are kept."""
    stats: messages.ActorStats = field(default_factory=messages.ActorStats)
    """Statistics of the last recorded heartbeat."""
    stats_at: float = -math.inf
    tokens_per_s: float = 0.0
    """Generation speed between the last two recorded heartbeats."""
    lease_ids: set[int] = field(default_factory=set)
    """Leases it must answer, evaluation included. `LeaseDesk` maintains them."""
    newest_lease_id: int | None = None
    """The newest lease sent to it."""
    reward_trouble: messages.RewardTrouble | None = None
    """Rewards that it cannot get for now, as of its last heartbeat."""
    is_trouble_reported: bool = False
    is_reachable: bool = True
    """False from a message that could not be sent to the next one received."""

    @property
    def name(self) -> str:
        """The actor's name."""
        return self.hello.actor

    def is_repeated(self, hello: messages.Hello, now: float) -> bool:
        """Return whether a hello was sent before the welcome for the same one arrived."""
        return now - self.welcomed_at < REPEATED_HELLO_S and hello.lease_ids == self.welcomed_with

    @property
    def is_quarantined(self) -> bool:
        """True when its log-probs of the canary were wrong at the last comparison."""
        return bool(self.mismatches)

    @property
    def state(self) -> Literal["quarantined", "unreachable", "new", "working"]:
        """The first reason why the actor may be sent no leases, `new` where it lacks weights; `working` without a reason."""
        if self.is_quarantined:
            return "quarantined"
        if not self.is_reachable:
            return "unreachable"
        return "new" if self.policy_version is None else "working"

    @property
    def takes_leases(self) -> bool:
        """True when the actor may be sent leases, if it has room."""
        return self.state == "working"

    @property
    def free(self) -> int:
        """Leases it would still take."""
        return self.capacity - len(self.lease_ids)

    def has_version(self, policy_version: int) -> bool:
        """Return whether its weights are of this policy version or newer."""
        return self.policy_version is not None and self.policy_version >= policy_version

    def status(self, now: float) -> messages.MemberStatus:
        """Describe the member to the operator; `now` is on the clock of `last_heard`."""
        engine = self.hello.engine
        return messages.MemberStatus(
            name=self.name,
            state=self.state,
            policy_version=-1 if self.policy_version is None else self.policy_version,
            num_leases=len(self.lease_ids),
            capacity=self.capacity,
            tokens_per_s=self.tokens_per_s,
            last_seen_s=now - self.last_heard,
            engine=f"{engine.name} {engine.version}",
        )


class Roster:
    """Owns the members, the actor processes that may not come back, and the count of refusals.

    Decides who may join. `LeaseDesk` ends the leases of a member that leaves; `Quarantine` decides which members are trusted.
    """

    def __init__(
        self, contract: Contract, hub: HubSection, versions: Versions, send_queue: SendQueue, record: Recorder
    ) -> None:
        self.rejections = Rejections()
        """Everything that was refused, by sender and reason."""
        self._contract = contract
        self._hub = hub
        self._versions = versions
        self._send_queue = send_queue
        self._record = record
        self._by_peer: dict[bytes, Member] = {}
        self._all_heard_at = -math.inf
        """A time after which every member was heard."""
        self._looked_at = -math.inf
        """Time of the last look for silent members."""
        self._lost_at: dict[str, deque[float]] = {}
        """Times at which each name was lost for its silence, newest last, the name that was lost last at the end."""
        self._barred: dict[tuple[str, int], str] = {}
        """The reason why a process may not come back, by its name and incarnation, oldest first."""

    def __iter__(self) -> Iterator[Member]:
        """Yield the members there are now; the roster may change meanwhile."""
        return iter(list(self._by_peer.values()))

    def __len__(self) -> int:
        return len(self._by_peer)

    def find(self, peer: bytes) -> Member | None:
        """Return the member at an address."""
        return self._by_peer.get(peer)

    def name_of(self, peer: bytes, sender: Sender) -> str:
        """Return the name by which to report a peer: a member's, else its key's, else the readable part of its address."""
        member = self.find(peer)
        if member is not None:
            return member.name
        return sender.name if sender.role else plain(peer.decode(errors="replace"), 64)

    def named(self, name: str) -> Member | None:
        """Return the live member of that name."""
        return next((member for member in self._by_peer.values() if member.name == name), None)

    # Joining and leaving

    def objection(self, peer: bytes, hello: messages.Hello, sender: Sender) -> str | None:
        """Return the reason why this actor may not join, with the cure; None for one that may."""
        if not sender.may_be(hello.actor):
            return (
                f"the actor's key is for {sender.name!r}, and it calls itself {hello.actor!r}: set actor.name, or use its key"
            )
        barred = self._barred.get((hello.actor, hello.incarnation))
        if barred is not None:
            return barred
        # Without a member of this name: the actor replaces it, after a restart for example.
        others = [member.hello for member in self if member.peer != peer and member.name != hello.actor]
        if len(others) >= self._hub.max_actors:
            return f"the run has hub.max_actors = {self._hub.max_actors} actors already"
        most = self._contract.max_peers
        if most is not None and len(others) >= most:
            return (
                f"the learner may open too few files for more than {most} actors: raise the limit of its machine (ulimit -Hn)"
            )
        reasons = (objection(self._contract, hello), source_objection(self._contract, hello, others))
        return "; ".join(filter(None, reasons)) or None

    def turn_away(self, peer: bytes, hello: messages.Hello, reason: str) -> None:
        """Refuse an actor that wants to join."""
        if self.rejections.count(hello.actor, reason):
            report(self._record, EventRow(event="actor_refused", detail=reason, actor=hello.actor))
        self._send_queue.send(peer, messages.Refused(reason=reason))

    def replaced_by(self, peer: bytes, hello: messages.Hello) -> Member | None:
        """Return the live member whose name a newer process has taken, and refuse that member from now on."""
        namesake = self.named(hello.actor)
        if namesake is None or namesake.peer == peer:
            return None
        self._bar(namesake, f"another actor named {namesake.name!r}, started later, is in the run: set actor.name")
        return namesake

    def dismiss(self, member: Member, reason: str) -> None:
        """Tell a member to end, and refuse its process from now on; a new process of the same name may join."""
        self._bar(member, reason)
        self.turn_away(member.peer, member.hello, reason)

    def _bar(self, member: Member, reason: str) -> None:
        self._barred[member.name, member.hello.incarnation] = reason
        if len(self._barred) > MAX_BARRED:
            del self._barred[next(iter(self._barred))]

    def add(self, peer: bytes, hello: messages.Hello, sender: Sender, now: float) -> Member:
        """Admit an actor that is not here yet."""
        member = Member(peer=peer, hello=hello, key_name=sender.name, last_heard=now)
        self._by_peer[peer] = member
        return member

    def report_joined(self, member: Member) -> None:
        """Record that an actor has joined, with its engine and harmless differences."""
        engine = member.hello.engine
        unlike = "".join(f"; {difference}" for difference in differences(self._contract, member.hello))
        detail = f"{engine.name} {engine.version} {engine.dtype} on {engine.device}{unlike}"
        report(self._record, EventRow(event="actor_joined", detail=detail, actor=member.name))

    def welcome(self, member: Member, hello: messages.Hello, now: float) -> None:
        """Send a member the contract of the run, in answer to its hello."""
        member.welcomed_at, member.welcomed_with = now, hello.lease_ids
        contract = self._contract
        welcome = messages.Welcome(
            run_id=contract.run_id,
            learner_incarnation=contract.learner_incarnation,
            max_message_bytes=contract.max_message_bytes,
            layout=contract.layout,
            policy_version=self._versions.current,
        )
        self._send_queue.send(member.peer, welcome, contract.canary_token_ids)

    def remove(self, member: Member) -> None:
        """Forget a member."""
        self._by_peer.pop(member.peer, None)

    # Hearing from members

    def hear(self, peer: bytes, now: float) -> Member | None:
        """Note that a message has arrived from an address; return the member there, if it is one."""
        member = self._by_peer.get(peer)
        if member is not None:
            member.last_heard = now
            member.is_reachable = True
        return member

    def silent(self, now: float) -> list[tuple[Member, float]]:
        """Return the members that are taken for dead, each with the seconds since it was heard."""
        self._looked_at = now
        if now - self._all_heard_at <= self._hub.dead_after_s:
            return []
        self._all_heard_at = min((member.last_heard for member in self), default=now)
        silences = ((member, now - member.last_heard) for member in self)
        silent = [(member, silent_s) for member, silent_s in silences if silent_s > self._hub.dead_after_s]
        for member, _ in silent:
            times = self._lost_at.pop(member.name, deque(maxlen=OFTEN_LOST))
            times.append(now)
            self._lost_at[member.name] = times
        while len(self._lost_at) > MAX_LOST:
            del self._lost_at[next(iter(self._lost_at))]
        return silent

    def often_lost(self) -> list[str]:
        """Return the names that were lost for their silence `OFTEN_LOST` times in the last `OFTEN_LOST_S`."""
        since = self._looked_at - OFTEN_LOST_S
        return [name for name, times in self._lost_at.items() if len(times) == OFTEN_LOST and times[0] >= since]

    def forgive(self, absent_s: float, now: float) -> None:
        """Do not count time in which the learner itself was stopped as silence of the actors."""
        for member in self._by_peer.values():
            # Not into the future: messages sent meanwhile have just been read.
            member.last_heard = min(now, member.last_heard + absent_s)

    def note_heartbeat(self, member: Member, heartbeat: messages.ActorHeartbeat) -> None:
        """Record a member's statistics and reward troubles, unless heartbeats come in a flood or from very many."""
        now = member.last_heard
        seconds = now - member.stats_at
        if seconds < max(messages.HEARTBEAT_S / 2, len(self) / MAX_ACTOR_ROWS_PER_S):
            return
        self._note_reward_trouble(member, heartbeat.reward_trouble)
        tokens = heartbeat.stats.num_generated_tokens - member.stats.num_generated_tokens
        member.tokens_per_s = tokens / seconds if math.isfinite(seconds) else 0.0
        member.stats, member.stats_at = heartbeat.stats, now
        stats = msgspec.structs.asdict(heartbeat.stats)
        version = None if heartbeat.policy_version < 0 else heartbeat.policy_version
        self._record(ActorRow(actor=member.name, policy_version=version, **stats))

    def _note_reward_trouble(self, member: Member, trouble: messages.RewardTrouble | None) -> None:
        """Remember which rewards a member cannot get; report the start and the end of a trouble that lasts."""
        last, member.reward_trouble = member.reward_trouble, trouble
        if trouble is not None and not member.is_trouble_reported and trouble.waiting_s >= TROUBLE_REPORTED_AFTER_S:
            member.is_trouble_reported = True
            report(self._record, EventRow(event="rewards_failing", detail=described(trouble), actor=member.name))
        elif trouble is None and member.is_trouble_reported and last is not None:
            member.is_trouble_reported = False
            detail = f"no group waits for its reward any more; the longest waited {last.waiting_s:.0f} s"
            report(self._record, EventRow(event="rewards_back", detail=detail, actor=member.name))

    def reward_problems(self) -> list[str]:
        """Return a sentence about each member whose rewards are failing for long."""
        troubles = ((member, member.reward_trouble) for member in self if member.is_trouble_reported)
        return [f"{member.name}: {described(trouble)}" for member, trouble in troubles if trouble is not None]

    def reject(self, peer: bytes, name: str, reason: str, cure: str | None = None) -> None:
        """Count a message that changes nothing, and tell its sender why and what to do."""
        if self.rejections.count(name, reason):
            report(self._record, EventRow(event="bad_message", detail=reason, peer=name))
        self._send_queue.send(peer, messages.Refused(reason=f"{reason}: {cure}" if cure else reason))

    # Trust

    def note_commit(self, member: Member, commit: messages.WeightsCommitted) -> str | None:
        """Note which weights a member samples with; return the reason to distrust it, for weights that nobody has sent."""
        published = self._versions.published
        if published is None or commit.policy_version > published:
            newest = "none are published" if published is None else f"the newest published are {published}"
            why = f"claims to have weights {commit.policy_version}; {newest}"
            self.rejections.count(member.name, "weights from the future")
            report(self._record, EventRow(event="actor_lied", detail=why, actor=member.name))
            return why
        member.policy_version = commit.policy_version
        self._record(CommitRow(actor=member.name, policy_version=commit.policy_version, stall_s=commit.stall_s))
        return None


def described(trouble: messages.RewardTrouble) -> str:
    """Return a member's trouble with rewards in words."""
    waiting = f"{len(trouble.lease_ids)} groups wait"
    return f"rewards are failing for {trouble.waiting_s:.0f} s, {waiting}: {trouble.problem}"


class LeaseTurns:
    """The members that take leases now, for one round of granting.

    Each turn goes to the one that uses the smallest share of its credit, and among equals to the one whose last lease is the
    oldest. So of N members that hold nothing each gets one of the next N leases, however unlike their credit and their speed.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        # With many actors, looking at all of them for each lease would take longer than everything else.
        self._turns = [
            _Turn(len(member.lease_ids) / member.capacity, _newest(member), order, len(member.lease_ids), member)
            for order, member in enumerate(members)
            if member.takes_leases and member.free > 0
        ]
        """The members' places in line, as a heap."""
        heapq.heapify(self._turns)
        # The leases of this round are newer than all others; their ids are not known here.
        self._numbers = itertools.count(1 << 63)

    def take(self, min_policy_version: int) -> Member | None:
        """Return the member that gets the next lease, if one has such weights.

        Within a round `min_policy_version` must not fall: members with older weights are forgotten.
        """
        while self._turns:
            turn = heapq.heappop(self._turns)
            member, num_held = turn.member, turn.num_held + 1
            if not member.has_version(min_policy_version):
                continue
            if num_held < member.capacity:
                newest = next(self._numbers)
                heapq.heappush(self._turns, _Turn(num_held / member.capacity, newest, turn.order, num_held, member))
            return member
        return None


class _Turn(NamedTuple):
    """A member's place in line; the smallest gets the next lease."""

    share: float
    """Leases that it holds, divided by its credit."""
    newest: int
    """Its newest lease; -1: none yet."""
    order: int
    """A different number for each member, which decides between those that are equal otherwise."""
    num_held: int
    member: Member


def _newest(member: Member) -> int:
    return -1 if member.newest_lease_id is None else member.newest_lease_id
