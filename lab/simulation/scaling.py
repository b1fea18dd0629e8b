"""The automatic number of actors in a simulated run: production's own policy, fed with the simulation's measures."""

import math
from typing import NamedTuple

from offbeat.common.settings.config import ScaleSection
from offbeat.lab.simulation.actors import SimulatedActors
from offbeat.learner.leases.demand import Demand, Use
from offbeat.learner.leases.staleness import StalenessPolicy


class Move(NamedTuple):
    """A decision of the policy at a simulated time."""

    policy_version: int
    seconds: float
    wanted: int
    """Number of actors that is wanted from then on."""
    reason: str


class Scaling:
    """Owns the wanted number of actors, and what is measured for the policy."""

    def __init__(
        self,
        scale: ScaleSection,
        num_actors: int,
        num_slots: int,
        *,
        start_s: float,
        available: int | None = None,
        lives_s: float | None = None,
        waits: float = 0.0,
    ) -> None:
        """
        Args:
            scale: Settings of the policy.
            num_actors: Actors that the run begins with.
            num_slots: Slots of each actor.
            start_s: Time from a decision until an actor has its weights.
            available: Actors that the pool has at most; None: as many as are wanted.
            lives_s: Time between two actors that are taken away; None: none is.
            waits: Share of the engines' time in which all leases wait for environments or rewards.
        """
        self.wanted = num_actors
        """Number of actors that the policy wants."""
        self.available = available if available is not None else scale.max
        self.start_s = start_s
        self.lives_s = lives_s
        self.moves: list[Move] = []
        """All decisions, advice included."""
        self._scale = scale
        self._num_slots = num_slots
        self._waits = waits
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
            waits=self._waits,
            enough=math.ceil(policy.most_open / self._num_slots),
        )
        decision = self._demand.observe(use, self.wanted, self._scale)
        if decision is None:
            return
        self.wanted = decision.actors or self.wanted
        self.moves.append(Move(policy_version, now, self.wanted, decision.reason))
