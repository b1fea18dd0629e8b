"""The rule by which a run is hopeless: after long enough it is worse than the model was before the first step."""

import statistics
from pathlib import Path

import msgspec

from offbeat.common.processes.files import replace
from offbeat.lab.history import RunHistory
from offbeat.lab.sweep.estimates import Curve

AFTER = 40
"""Steps, beside the lag, from which on a run may be hopeless."""
WINDOW = 4
"""Evaluations in a row whose mean reward is below the one before the first step, less `MARGIN`."""
MARGIN = 0.05
NUM_STEPS = 5
"""Steps whose mean reward stands for an evaluation, in a run without evaluations."""
HOPELESS_FILE = "hopeless.json"
"""File in the folder of a run that was stopped by the rule, with the reason."""


class Hopeless(msgspec.Struct, frozen=True):
    """The reason why a run is hopeless."""

    step: int
    """Optimizer steps taken."""
    reward: float
    """Mean of the last `WINDOW` evaluations."""
    first_reward: float
    """The evaluation before the first step."""

    def __str__(self) -> str:
        return f"reward {self.reward:.3g} at step {self.step}, {self.first_reward:.3g} before the first"


def why_hopeless(rewards: Curve, *, lag: int) -> Hopeless | None:
    """Return the reason why a run with these evaluations over steps is hopeless; None for one that is not, or not yet.

    `lag` is the number of steps after which the rollouts of the first weights are used up. Without an evaluation before the
    first step nothing can be said.
    """
    if len(rewards.xs) <= WINDOW or rewards.xs[0] > 0 or rewards.xs[-1] < AFTER + lag:
        return None
    recent = statistics.fmean(rewards.ys[-WINDOW:])
    if recent >= rewards.ys[0] - MARGIN:
        return None
    return Hopeless(int(rewards.xs[-1]), recent, rewards.ys[0])


def evaluations_of(history: RunHistory) -> Curve:
    """Return the reward of a run's evaluations over steps.

    In a run without evaluations the reward of the first step, whose rollouts are of the first weights, stands for the one
    before it, and the means of `NUM_STEPS` steps each for the others.
    """
    known = {version: row.reward for version, row in history.evaluations.items() if row.reward is not None}
    if known:
        versions = sorted(known)
        return Curve([float(version) for version in versions], [known[version] for version in versions])
    steps = [(row.policy_version, reward) for row in history.steps if (reward := row.number("reward/mean")) is not None]
    if not steps:
        return Curve([], [])
    blocks = [steps[end - NUM_STEPS : end] for end in range(NUM_STEPS, len(steps) + 1, NUM_STEPS)]
    first_version, first_reward = steps[0]
    return Curve(
        [first_version - 1.0, *(float(block[-1][0]) for block in blocks)],
        [first_reward, *(statistics.fmean(reward for _, reward in block) for block in blocks)],
    )


def mark_hopeless(folder: Path, reason: Hopeless) -> None:
    """Write the reason into a run's folder: from now on the run counts as ended."""
    replace(folder / HOPELESS_FILE, msgspec.json.encode(reason) + b"\n")


def read_hopeless(folder: Path) -> Hopeless | None:
    """Return the reason why the run in a folder was stopped; None for a run that was not stopped by the rule."""
    try:
        return msgspec.json.decode((folder / HOPELESS_FILE).read_bytes(), type=Hopeless)
    except FileNotFoundError:
        return None
