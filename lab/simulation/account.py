"""The account of a simulated run: its open leases, the counts of those that ended, and integrals over time.

From these measures production's own policy decides the number of actors, where `scale.auto` is simulated.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.common.settings.config import ScaleSection
from offbeat.lab.simulation.actors import SimulatedActors, SimulatedGroup
from offbeat.learner.leases.demand import Demand, Use
from offbeat.learner.leases.staleness import StalenessPolicy


@dataclass(slots=True)
class Totals:
    """Sums from the start of the run."""

    leased: int = 0
    trained: int = 0
    dropped: int = 0
    """Groups evicted because they were too old when their turn came."""
    aborted: int = 0
    """Leases cancelled while they were generated."""
    in_flight: int = 0
    """Leases being generated, buffered or trained on, now."""
    generated_s: float = 0.0
    """Seconds of generation of all groups, those of evaluation included; of cancelled groups, the time until then."""
    wasted_s: float = 0.0
    """The part of `generated_s` that went into groups never trained on."""
    wait_leases_s: float = 0.0
    """Actor seconds without a group in flight, while the policy admits no lease, or too few for all actors."""
    wait_weights_s: float = 0.0
    """Actor seconds without a group in flight, while the next lease waits for newer weights."""
    slots_s: float = 0.0
    """Integral over time of leases that actors hold, those for evaluation left out."""
    open_s: float = 0.0
    """Integral over time of groups begun and not yet trained on: its mean is the L of Little's law."""


class Account:
    """The `learner.leases.scheduler.Books` of a simulation, with its sums."""

    def __init__(self) -> None:
        self._in_flight: dict[int, SimulatedGroup] = {}
        """Groups to train on that actors hold, by lease id, oldest first."""
        self._ready: dict[int, SimulatedGroup] = {}
        """Groups that a batch can be selected from, by lease id, in the order in which they were finished."""
        self._training: list[SimulatedGroup] = []
        self.totals = Totals()
        """The sums until now."""

    @property
    def num_open(self) -> int:
        """Leases being generated, buffered or trained on."""
        return self.totals.in_flight

    @property
    def num_ready(self) -> int:
        """Groups that a batch can be selected from."""
        return len(self._ready)

    def ready_groups(self) -> Sequence[SimulatedGroup]:
        """Return the groups that a batch can be selected from, oldest lease first."""
        return sorted(self._ready.values(), key=lambda group: group.lease_id)

    def generating(self) -> Iterable[SimulatedGroup]:
        """Return the groups that actors hold, oldest lease first."""
        return self._in_flight.values()

    def grant(self, group: SimulatedGroup) -> None:
        """Enter a new lease."""
        self._in_flight[group.lease_id] = group
        self.totals.in_flight += 1
        self.totals.leased += 1

    def accept(self, group: SimulatedGroup) -> None:
        """Move a group into the buffer."""
        self._ready[group.lease_id] = self._in_flight.pop(group.lease_id)

    def drop(self, group: SimulatedGroup) -> None:
        """Remove a group from the buffer: it is never trained on."""
        del self._ready[group.lease_id]
        self.totals.wasted_s += group.generate_s
        self.totals.dropped += 1
        self.totals.in_flight -= 1

    def abort(self, lease_id: int) -> SimulatedGroup:
        """Remove a lease that an actor holds and return its group; its generation is for the caller to add."""
        self.totals.aborted += 1
        self.totals.in_flight -= 1
        return self._in_flight.pop(lease_id)

    def begin_batch(self, groups: list[SimulatedGroup]) -> None:
        """Move groups from the buffer into training."""
        for group in groups:
            del self._ready[group.lease_id]
        self._training = groups

    def end_batch(self) -> list[SimulatedGroup]:
        """Count the groups in training as trained and return them."""
        groups, self._training = self._training, []
        self.totals.trained += len(groups)
        self.totals.in_flight -= len(groups)
        return groups

    def pass_time(self, seconds: float, num_idle: int, *, needs_weights: bool) -> None:
        """Integrate over this time, in which `num_idle` actors had no lease.

        `needs_weights`: the bound admits a lease, and no actor has weights new enough for it.
        """
        num_in_flight = len(self._in_flight)
        self.totals.slots_s += num_in_flight * seconds
        self.totals.open_s += (num_in_flight + len(self._ready)) * seconds
        if needs_weights:
            self.totals.wait_weights_s += num_idle * seconds
        else:
            self.totals.wait_leases_s += num_idle * seconds


class Move(NamedTuple):
    """A decision of the policy at a simulated time."""

    policy_version: int
    seconds: float
    wanted: int
    """Number of actors that is wanted from then on."""
    reason: str


class Scaling:
    """Owns the wanted number of actors, and what is measured for the policy."""

    def __init__(self, scale: ScaleSection, num_actors: int, num_slots: int, *, start_s: float) -> None:
        """
        Args:
            scale: Settings of the policy.
            num_actors: Actors that the run begins with.
            num_slots: Slots of each actor.
            start_s: Time from a decision until an actor has its weights.
        """
        self.wanted = num_actors
        """Number of actors that the policy wants."""
        self.start_s = start_s
        self.moves: list[Move] = []
        """All decisions, advice included."""
        self._scale = scale
        self._num_slots = num_slots
        self._demand = Demand()
        self._num_actors = num_actors
        self._free_s = self._slot_s = 0.0
        self._last = 0.0

    def pass_time(self, seconds: float, actors: SimulatedActors) -> None:
        """Integrate the free slots over this time."""
        self._num_actors = actors.num_staying
        self._free_s += seconds * actors.num_free
        self._slot_s += seconds * actors.num_staying * self._num_slots

    def observe(self, now: float, waited_s: float, policy: StalenessPolicy, policy_version: int) -> None:
        """Show the policy the batch that has just ended, and take up its decision.

        Like production it sees nothing of the run's end, where leases are few because little is left to train.
        """
        seconds, self._last = now - self._last, now
        spare = self._free_s / self._slot_s if self._slot_s else 0.0
        self._free_s = self._slot_s = 0.0
        if policy.left_in_run(policy_version) <= policy.most_open:
            return
        use = Use(
            seconds=seconds,
            waited_s=min(waited_s, seconds),
            num_actors=self._num_actors,
            num_new=0,
            spare=spare,
            waits=0.0,
            enough=math.ceil(policy.most_open / self._num_slots),
        )
        decision = self._demand.observe(use, self.wanted, self._scale)
        if decision is None:
            return
        self.wanted = decision.actors or self.wanted
        self.moves.append(Move(policy_version, now, self.wanted, decision.reason))
