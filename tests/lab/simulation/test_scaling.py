"""The automatic number of actors, production's own policy in the simulation: it settles near the number that is needed."""

import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from offbeat.common.settings.config import (
    ActorSection,
    Config,
    DataSection,
    ModelSection,
    RolloutSection,
    ScaleSection,
    StalenessSection,
)
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.common.settings.loading import resolved_toml
from offbeat.deploy.cli.main import make_app
from offbeat.lab.simulation.account import Scaling
from offbeat.lab.simulation.simulation import SimulatedBatch, Simulation
from offbeat.lab.simulation.timings import Fleet, Timings
from offbeat.learner.leases.demand import Demand, DemandDecision, Use
from offbeat.learner.leases.evaluation import Evaluations
from offbeat.learner.leases.staleness import StalenessPolicy

pytestmark = pytest.mark.slow  # simulates hours

GROUPS, SLOTS, STEPS = 16, 4, 160
"""Groups of a step, slots of an actor, optimizer steps."""
NUM_DRAWN = 2048


@dataclass(frozen=True)
class Regime:
    """A run whose learner takes 10 s a step: `GROUPS * group_s / 10 / SLOTS` actors keep up with it."""

    begins_with: int
    ends_between: tuple[int, int]
    """Smallest and largest number of actors that it may end with."""
    most_moves: int
    """Moves of the number that are not too many."""
    group_s: float = 30.0
    """Mean seconds of a group; 12 actors are needed for 30."""
    sigma: float = 0.5
    """Standard deviation of their logarithm."""
    staleness: int = 4
    cores: int | None = None
    later_s: float | None = None
    """Mean seconds of a group from the middle of the run on."""
    says: str = ""
    """Part of the last reason."""
    scale: dict[str, Any] = field(default_factory=dict)
    start_s: float = 30.0
    """Time from a decision until an actor has its weights."""
    lives_s: float = math.inf
    """Time between two actors that are taken away, as spot instances are."""
    available: int = 64
    """Actors that the pool has at most."""
    waits: float = 0.0
    """Share of the engines' time in which all leases wait for environments or rewards."""


REGIMES = {
    "few-actors": Regime(1, (12, 14), 5),
    "many-actors": Regime(64, (12, 14), 3),
    "enough-actors": Regime(13, (13, 13), 0),
    "slow-start": Regime(2, (12, 14), 4, start_s=300.0),
    "long-tails": Regime(2, (11, 15), 5, sigma=1.2),
    "bound-limited": Regime(2, (8, 8), 2, staleness=1, group_s=60.0, says="widen staleness.max_staleness"),
    "synchronous": Regime(2, (2, 2), 0, staleness=0, says="widen staleness.max_staleness"),
    "tool-bound": Regime(2, (2, 2), 0, says="raise actor.max_inflight_groups", waits=0.8),
    "actors-that-end": Regime(2, (12, 15), 4, lives_s=150.0),
    "pool-too-small": Regime(2, (8, 8), 2, available=6, says="of 8 wanted actors 6.0 are there"),
    "slower-later": Regime(2, (18, 21), 4, group_s=20.0, later_s=50.0),
    "faster-later": Regime(2, (8, 10), 6, group_s=50.0, later_s=20.0),
    "shared-cores": Regime(1, (1, 4), 4, cores=2, says="made no step faster"),
    "small-maximum": Regime(1, (6, 6), 3, scale={"max": 6}, says="scale.max = 6 is reached"),
}


class WaitingDemand(Demand):
    """Is told of engines that wait."""

    waits = 0.0

    def observe(self, use: Use, wanted: int, scale: ScaleSection) -> DemandDecision | None:
        return super().observe(use._replace(waits=self.waits), wanted, scale)


class PoolSimulation(Simulation):
    """Takes actors away from time to time, and has no more than it has."""

    regime: Regime
    ended_at = 0.0

    def _reconcile(self, scaling: Scaling) -> None:
        if self._clock.seconds >= self.ended_at + self.regime.lives_s and self._actors.num_staying > 1:
            self.ended_at += self.regime.lives_s
            self._actors.leave()
        wanted, scaling.wanted = scaling.wanted, min(scaling.wanted, self.regime.available)
        super()._reconcile(scaling)
        scaling.wanted = wanted


class ChangingScaling(Scaling):
    """Makes all groups longer or shorter in the middle of the run."""

    group_s: list[float]
    factor = 1.0

    def observe(self, now: float, waited_s: float, policy: StalenessPolicy, policy_version: int) -> None:
        super().observe(now, waited_s, policy, policy_version)
        if policy_version == STEPS // 2:
            self.group_s[:] = [seconds * self.factor for seconds in self.group_s]


def run(regime: Regime, seed: int = 0) -> tuple[list[SimulatedBatch], ChangingScaling]:
    train = TrainSection(num_steps=STEPS, groups_per_step=GROUPS)
    policy = StalenessPolicy(StalenessSection(max_staleness=regime.staleness), train)
    drawn = np.random.default_rng(seed).lognormal(-(regime.sigma**2) / 2, regime.sigma, (NUM_DRAWN, 1))
    timings = Timings(regime.group_s * drawn, np.array([10.0]), np.array([0.5]))
    scale = ScaleSection(**{"auto": True, "max": 64, **regime.scale})
    scaling = ChangingScaling(scale, regime.begins_with, SLOTS, start_s=regime.start_s)
    scaling._demand = WaitingDemand()
    scaling._demand.waits = regime.waits
    simulation = PoolSimulation(
        policy,
        Evaluations(interval=0, num_prompts=1),
        timings,
        Fleet(regime.begins_with, SLOTS, regime.cores),
        evaluation_group_size=1,
        weights_interval=1,
        seed=seed,
        scaling=scaling,
    )
    simulation.regime = regime
    scaling.group_s = simulation._actors._group_s
    scaling.factor = (regime.later_s or regime.group_s) / regime.group_s
    return simulation.run(STEPS), scaling


def turns(numbers: list[int]) -> int:
    """Return how often a number that went up goes down next, or the reverse."""
    signs = [math.copysign(1, after - before) for before, after in itertools.pairwise(numbers) if after != before]
    return sum(one != other for one, other in itertools.pairwise(signs))


@pytest.mark.parametrize("name", REGIMES)
def test_number_of_actors_settles_near_what_is_needed_and_does_not_swing(name: str) -> None:
    regime = REGIMES[name]
    for seed in (0, 1):
        _, scaling = run(regime, seed)
        numbers = [regime.begins_with, *(move.wanted for move in scaling.moves)]
        least, most = regime.ends_between
        assert least <= numbers[-1] <= most, scaling.moves
        assert sum(before != after for before, after in itertools.pairwise(numbers)) <= regime.most_moves, scaling.moves
        assert turns(numbers) <= 1, scaling.moves
        assert regime.says in (scaling.moves[-1].reason if scaling.moves else ""), scaling.moves


def test_learner_hardly_waits_once_the_number_has_settled() -> None:
    batches, _ = run(REGIMES["few-actors"])
    late = batches[STEPS // 2 : -6]
    assert sum(batch.waited_s for batch in late) / (late[-1].ended_at - late[0].ended_at) < 0.1


def test_actors_join_and_leave_in_the_simulation_and_every_lease_adds_up() -> None:
    batches, scaling = run(REGIMES["faster-later"])
    totals = batches[-1].totals
    assert len({move.wanted for move in scaling.moves}) > 3
    assert totals.leased == totals.trained + totals.dropped + totals.aborted + totals.in_flight
    assert totals.trained == GROUPS * STEPS


def test_command_shows_each_move_of_the_number_with_its_reason(tmp_path: Path) -> None:
    config = Config(
        model=ModelSection(path="none"),
        data=DataSection(train_data="none"),
        rollout=RolloutSection(group_size=2),
        train=TrainSection(num_steps=STEPS, groups_per_step=GROUPS),
        actor=ActorSection(max_inflight_groups=SLOTS),
        scale=ScaleSection(auto=True, max=64),
    )
    (tmp_path / "run.toml").write_text(resolved_toml(config))
    arguments = ["simulate", str(tmp_path / "run.toml"), "--scale", "auto", "--actors", "2", "--minutes", "1000"]
    arguments += ["--completion-s", "30", "--sigma", "0.1", "--train-s", "10", "--start-s", "30"]
    result = CliRunner().invoke(make_app(), [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    run = json.loads(result.output)["run"]
    assert (run["num_actors"], run["num_steps"]) == (2, STEPS)
    assert 12 <= run["moves"][-1][2] <= 14
    assert run["learner_waits"] < 0.1
    shown = CliRunner().invoke(make_app(), arguments).output
    assert "the learner starves" in shown
    assert f"{STEPS} steps in" in shown
