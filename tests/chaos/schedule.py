"""The faults of a chaos round, their targets and their times, all drawn from its seed."""

import random
from typing import Literal, NamedTuple, get_args

Kind = Literal[
    "kill learner",
    "kill learner in checkpoint",
    "kill actor",
    "kill actor's child",
    "preempt actor",
    "scale",
    "stop learner",
    "stop actor",
    "cut connection",
    "partition",
    "packet loss",
    "corrupt log",
    "corrupt log's middle",
    "damage checkpoint",
    "fill disk",
    "fill disk in checkpoint",
    "limit file size",
    "jump clock",
    "judge down",
    "doubt learner",
    "second learner",
    "resume with changes",
    "another run's log",
    "append data",
    "descriptors gone",
    "strangers speak",
    "kill environment",
    "wedge tool",
    "leave daemon",
    "tool down",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

Target = Literal["learner", "local actor", "remote actor", "launcher"]

_TARGETS: dict[Kind, tuple[Target, ...]] = {
    "kill actor": ("local actor", "remote actor"),
    "kill actor's child": ("local actor", "remote actor"),
    "stop actor": ("local actor", "remote actor"),
    # Half of the actors: one of the two. The launcher takes it for granted that a local actor that leaves was asked to.
    "preempt actor": ("remote actor",),
    # Only the remote actor's connection can be disturbed.
    "cut connection": ("remote actor",),
    "partition": ("remote actor",),
    "packet loss": ("remote actor",),
}

_DURATIONS_S: dict[Kind, tuple[float, float]] = {
    # Shorter than the four comparisons, after waits of 2, 4 and 8 s, that end a run.
    "doubt learner": (2.0, 6.0),
    # An actor needs about as long to start.
    "scale": (3.0, 10.0),
    "packet loss": (3.0, 8.0),
    "fill disk": (3.0, 8.0),
    "fill disk in checkpoint": (1.0, 2.0),
    "limit file size": (3.0, 8.0),
    "jump clock": (1.0, 5.0),
    "judge down": (3.0, 8.0),
    "descriptors gone": (3.0, 8.0),
    "tool down": (3.0, 8.0),
}
FILLING: tuple[Kind, ...] = ("fill disk", "fill disk in checkpoint", "limit file size")
"""Faults of the first half of a round: without room at its end, a run leaves no trained model and says so."""
IN_CHECKPOINT: tuple[Kind, ...] = ("kill learner in checkpoint", "fill disk in checkpoint")
"""Faults that wait until the learner writes a checkpoint."""
OF_ENVIRONMENTS: tuple[Kind, ...] = ("kill environment", "wedge tool", "leave daemon", "tool down")
"""Faults of runs with an environment."""
OF_REWARDS: tuple[Kind, ...] = ("judge down",)
"""Faults of runs without one."""
FIRST_STEP = 3
"""The earliest optimizer step of a fault; before it the services are still starting."""


class Fault(NamedTuple):
    """A disturbance of a run."""

    kind: Kind
    target: Target
    at_step: int
    """Optimizer step after which the fault is committed."""
    delay_s: float
    """Seconds to wait after that step, so that the fault hits the learner anywhere in a step."""
    duration_s: float
    """Duration of the fault; 0 for an instantaneous one."""
    seed: int
    """Seed of the fault's other random choices."""


def round_seed(seed: int, index: int) -> int:
    """Return the seed of round `index` of a chaos run."""
    return random.Random(f"{seed}/{index}").getrandbits(32)


def kinds_of(*, has_environment: bool) -> list[Kind]:
    """Return the kinds of faults that a run can meet."""
    absent = OF_REWARDS if has_environment else OF_ENVIRONMENTS
    return [kind for kind in KINDS if kind not in absent]


def plan(seed: int, *, num_steps: int, dead_after_s: float, has_environment: bool = False) -> list[Fault]:
    """Return the faults of one round in the order of their steps: each kind once, spread over `num_steps`.

    Times are optimizer steps rather than seconds, so that a slower machine sees the same faults. About half of the stops and
    partitions are shorter than `dead_after_s`, the others longer.
    """
    generator = random.Random(seed)
    known = kinds_of(has_environment=has_environment)
    others: list[Kind] = [kind for kind in known if kind not in FILLING]
    kinds = generator.sample(others, len(others))
    for kind in FILLING:
        kinds.insert(generator.randrange(len(known) // 2), kind)
    # The last fault must leave time to recover from it.
    steps = sorted(generator.randint(FIRST_STEP, num_steps * 9 // 10) for _ in kinds)
    return [
        Fault(
            kind,
            generator.choice(_TARGETS.get(kind, ("learner",))),
            at_step,
            generator.uniform(0.0, 1.0),
            _duration(generator, kind, dead_after_s),
            generator.getrandbits(32),
        )
        for kind, at_step in zip(kinds, steps, strict=True)
    ]


def _duration(generator: random.Random, kind: Kind, dead_after_s: float) -> float:
    if kind in ("stop learner", "stop actor", "partition"):
        low, high = generator.choice([(0.1, 0.7), (1.2, 2.0)])
        return generator.uniform(low, high) * dead_after_s
    return generator.uniform(*_DURATIONS_S.get(kind, (0.0, 0.0)))
