"""The automatic number of actors: moves `scale.actors` by who waits for whom.

    starved      share of the time in which the learner waited for rollouts
    spare        share of the actors' lease slots without a lease
    waits        share of the engines' time in which all leases waited for environments or rewards
    enough       actors that hold every lease the staleness bound admits; more of them never hold one

Means over `WINDOW_STEPS` steps under one wanted number decide, over twice as many where the number would fall:

    grow      starved, nothing spare       to n / (1 - starved), at most twice n
    shrink    not starved, much spare      to the slots in use and a tenth more
              more than enough             to enough
    advise    starved, and more actors would not help: the bound holds back what they could do, or their engines wait

The serving world scales by the queue of requests, which in a training run is always full: it is the credit. A number at which
the learner starved is remembered, and so is a growth that made no step faster: neither is tried again for long, so the number
settles. Pure: time is the sum of the observed steps'.
"""

import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from offbeat.common.records.rows import StepRow
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.common.settings.config import ScaleSection

STARVED = 0.10
"""Share of the learner's time in waiting above which it starves."""
SPARE = 0.10
"""Spare share of the lease slots above which actors could do more."""
MUCH_SPARE = 0.25
"""Spare share above which there are too many actors."""
OUTSIDE = 0.5
"""Share of the engines' time in waiting for environments and rewards above which they, and not actors, are short."""
ROOM = 1.1
"""Actors kept after a shrink over those in use. The spare share is then 0.09: far from both limits."""
MOST_GROWTH = 2.0
"""Largest factor of a growth: the share in which the learner starves is a poor measure when it is large."""
JUDGED_GROWTH = 1.5
"""Smallest factor of a growth whose effect is judged: that of a smaller one is lost in the noise."""
LEAST_GAIN = 0.95
"""A growth after which a step takes more than this part of its former time was useless."""
WINDOW_STEPS = 8
"""Steps that are averaged."""
SKIPPED_STEPS = 4
"""Steps after a change that do not count: their groups were generated before it, or while the buffer filled."""
MEMORY_STEPS = 100
"""Steps for which a number that was too small is not tried again."""
USELESS_STEPS = 200
"""Steps for which a growth that made no step faster is not tried again."""
ABSENT = 0.75
"""Share of the wanted actors below which more are not asked for: those that were do not come."""
FIRST_START_S = 60.0
"""Time that actors are taken to need to start, before the first ones were measured."""
PATIENCE_S = 600.0
"""Longest wait for actors that do not come, before decisions go on with those that are there; at least 4 times as long as the
last ones took."""


class Use(NamedTuple):
    """Use of the actors during one optimizer step."""

    seconds: float
    """Wall time of the step, waiting included."""
    waited_s: float
    """The part of it in which the learner waited for rollouts."""
    num_actors: int
    """Actors that take leases."""
    num_new: int
    """Actors that have joined and have no weights yet."""
    spare: float
    """Mean share of the lease slots that held no lease."""
    waits: float
    """Share of the engines' time in which they idled while leases waited for environments or rewards."""
    enough: int
    """Actors that hold every lease that the bound admits."""
    is_troubled: bool = False
    """An actor is in quarantine, or the rollout log is full: the numbers say nothing about demand."""


class DemandDecision(NamedTuple):
    """A move of the wanted number, or advice that the run needs something else than actors."""

    actors: int | None
    """The new number; None for advice."""
    reason: str


class Demand:
    """Decides on the number of actors from the use of all steps, in order."""

    def __init__(self, actor_hours: float = 0.0) -> None:
        """`actor_hours` were used by the learner processes before this one."""
        self.actor_hours = actor_hours
        """Hours of actors so far."""
        self._now = 0.0
        self._num_steps = 0
        self._wanted: int | None = None
        self._window: deque[Use] = deque(maxlen=2 * WINDOW_STEPS)
        self._start_s = FIRST_START_S
        """Time that the last actors took from being wanted to their first leases."""
        self._awaited_since: float | None = None
        """Time at which more actors were wanted than were there; None once they have come, or were waited for long enough."""
        self._num_to_skip = 0
        self._rest_until = 0.0
        self._too_few: _Memory | None = None
        self._grown_from: _Memory | None = None
        """The last growth, until its effect is known."""
        self._useless_above: _Memory | None = None
        self._advised = ""
        """The kind of the last advice; it is not repeated while it holds."""
        self.advice = ""
        """A change that the run needs instead of more actors; empty where it needs none."""

    def observe(self, use: Use, wanted: int, scale: ScaleSection) -> DemandDecision | None:
        """Add a step and return a move of the `wanted` number, or new advice, or None.

        A moved number is taken to be in force from the next step on; a person may set another one at any time.
        """
        self._now += use.seconds
        self._num_steps += 1
        self.actor_hours += use.num_actors * use.seconds / 3600
        if not scale.auto:
            self._window.clear()
            return None
        self._follow(use, wanted)
        if scale.max_actor_hours is not None and self.actor_hours >= scale.max_actor_hours:
            reason = f"{self.actor_hours:.1f} actor hours are used, scale.max_actor_hours = {scale.max_actor_hours:g}"
            return self._move(scale.min, reason) if wanted > scale.min else self._advise("hours", f"{reason}: no growth")
        if not scale.min <= wanted <= scale.max:
            return self._move(min(max(wanted, scale.min), scale.max), f"scale.min = {scale.min}, scale.max = {scale.max}")
        if self._is_awaiting(use, wanted) or use.is_troubled:
            self._window.clear()
            return None
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        if not use.num_new:
            self._window.append(use)
        if len(self._window) < WINDOW_STEPS or self._now < self._rest_until:
            return None
        return self._weigh(wanted, scale)

    def _follow(self, use: Use, wanted: int) -> None:
        """Start anew at another wanted number."""
        if wanted == self._wanted:
            return
        self._wanted = wanted
        self._window.clear()
        self._num_to_skip = SKIPPED_STEPS
        self._awaited_since = self._now - use.seconds if use.num_actors < wanted else None

    def _is_awaiting(self, use: Use, wanted: int) -> bool:
        """Return whether wanted actors have yet to come. Those that are lost later are not waited for."""
        if self._awaited_since is None:
            return False
        waited_s = self._now - self._awaited_since
        if use.num_actors >= wanted:
            self._start_s = waited_s
        elif waited_s <= max(PATIENCE_S, 4 * self._start_s):
            return True
        self._awaited_since = None
        return False

    def _weigh(self, wanted: int, scale: ScaleSection) -> DemandDecision | None:
        """Return the decision on the newest steps."""
        mean = _mean(list(self._window)[-WINDOW_STEPS:])
        is_starved = mean.starved > STARVED
        others = max(0.0, mean.actors - wanted)
        most = max(scale.min, min(scale.max, math.ceil(mean.enough - others)))
        undone = self._undo_growth(mean, wanted, is_starved=is_starved)
        if undone is not None:
            return undone
        if is_starved and mean.spare < SPARE:
            return self._relieve(mean, wanted, most, others, scale)
        if is_starved and wanted <= most:
            help_ = "will not help" if wanted == most else "would help less"
            return self._advise(
                "bound",
                f"the learner starves {mean.starved:.0%} of its time, and {mean.spare:.0%} of the lease slots are free: widen "
                f"staleness.max_staleness; more actors {help_}",
            )
        if len(self._window) < 2 * WINDOW_STEPS:
            return None
        mean = _mean(self._window)
        if wanted > most:
            return self._shrink(most, wanted, f"the bound admits leases for {most} actors")
        if mean.spare > MUCH_SPARE:
            target = math.ceil(mean.actors * (1 - mean.spare) * ROOM - others)
            return self._shrink(max(target, scale.min), wanted, f"{mean.spare:.0%} of the lease slots are free")
        self._forget_advice()
        return None

    def _relieve(self, mean: "_Mean", wanted: int, most: int, others: float, scale: ScaleSection) -> DemandDecision | None:
        """Return the growth, or the advice, for a learner that starves while no lease slot is free."""
        starved = f"the learner starves {mean.starved:.0%} of its time, and no lease slot is free"
        if mean.waits > OUTSIDE:
            return self._advise(
                "waits",
                f"{starved}, but engines idle {mean.waits:.0%} of their time while leases wait for environments or rewards: "
                "raise actor.max_inflight_groups; engines are not what is missing",
            )
        useful = self._remembered(self._useless_above, USELESS_STEPS)
        if useful is not None and wanted >= useful:
            return self._advise("useless", f"{starved}, but more than {useful} actors made no step faster")
        if mean.actors <= ABSENT * wanted:
            return self._advise("absent", f"{starved}, but of {wanted} wanted actors {mean.actors:.1f} are there")
        # Rounded: a mean of floats may lie a hair above a whole number.
        target = math.ceil(round(mean.actors / max(1 / MOST_GROWTH, 1 - mean.starved) - others, 6))
        target = min(max(target, wanted + 1), most)
        if target > wanted:
            self._too_few = self._grown_from = _Memory(wanted, self._num_steps, mean.step_s)
            return self._move(target, starved)
        if wanted >= scale.max:
            return self._advise("max", f"{starved}: scale.max = {scale.max} is reached")
        return self._advise(
            "bound", f"{starved}, but the bound admits no more leases: widen staleness.max_staleness; more actors will not help"
        )

    def _undo_growth(self, mean: "_Mean", wanted: int, *, is_starved: bool) -> DemandDecision | None:
        """Take back a growth after which the learner starves as before: the actors may share what they are short of."""
        grown, self._grown_from = self._grown_from, None
        if grown is None or not is_starved or wanted < JUDGED_GROWTH * grown.actors:
            return None
        if mean.step_s <= LEAST_GAIN * grown.step_s:
            return None
        self._useless_above = _Memory(grown.actors, self._num_steps, mean.step_s)
        reason = f"{wanted} actors make a step no faster than {grown.actors}: {mean.step_s:.3g} s, before {grown.step_s:.3g} s"
        return self._move(grown.actors, reason)

    def _shrink(self, target: int, wanted: int, reason: str) -> DemandDecision | None:
        too_few = self._remembered(self._too_few, MEMORY_STEPS)
        if too_few is not None:
            target = max(target, too_few + 1)
        self._forget_advice()
        return self._move(target, reason) if target < wanted else None

    def _remembered(self, memory: "_Memory | None", num_steps: int) -> int | None:
        """Return the number in a memory that is younger than this many steps."""
        return memory.actors if memory is not None and self._num_steps - memory.at_step < num_steps else None

    def _move(self, actors: int, reason: str) -> DemandDecision:
        self._window.clear()
        self._rest_until = self._now + 2 * self._start_s
        self._forget_advice()
        return DemandDecision(actors, reason)

    def _advise(self, kind: str, reason: str) -> DemandDecision | None:
        self.advice = reason
        if kind == self._advised:
            return None
        self._advised = kind
        return DemandDecision(None, reason)

    def _forget_advice(self) -> None:
        self._advised = self.advice = ""


class _Memory(NamedTuple):
    """A number of actors, and what was seen with it."""

    actors: int
    at_step: int
    step_s: float


class _Mean(NamedTuple):
    """Means over a window of steps."""

    starved: float
    spare: float
    waits: float
    actors: float
    enough: float
    step_s: float


def _mean(window: Iterable[Use]) -> _Mean:
    uses = list(window)
    seconds = math.fsum(use.seconds for use in uses)

    def over_time(values: Iterable[float]) -> float:
        return math.fsum(value * use.seconds for value, use in zip(values, uses, strict=True)) / seconds

    return _Mean(
        starved=math.fsum(use.waited_s for use in uses) / seconds,
        spare=over_time(use.spare for use in uses),
        waits=over_time(use.waits for use in uses),
        actors=over_time(use.num_actors for use in uses),
        enough=over_time(use.enough for use in uses),
        step_s=seconds / len(uses),
    )


def last_actor_hours(run_folder: Path) -> float:
    """Return the sum of the actors' time, in hours, as the run's last step tells it; 0 before the first step."""
    newest = deque(read_rows_of(run_folder / ROWS_FILE, StepRow), maxlen=1)
    return newest[0].number("actors/hours") or 0.0 if newest else 0.0
