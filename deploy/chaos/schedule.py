"""Which faults a chaos run commits, on whom and when: a function of its seed."""

import random
from typing import Literal, NamedTuple, get_args

Kind = Literal[
    "kill learner",
    "kill learner in checkpoint",
    "kill actor",
    "kill actor's child",
    "stop learner",
    "stop actor",
    "cut connection",
    "partition",
    "packet loss",
    "corrupt log",
    "fill disk",
    "jump clock",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

Target = Literal["learner", "local actor", "remote actor"]

_TARGETS: dict[Kind, tuple[Target, ...]] = {
    "kill actor": ("local actor", "remote actor"),
    "kill actor's child": ("local actor", "remote actor"),
    "stop actor": ("local actor", "remote actor"),
    # Only the remote actor's connection can be disturbed.
    "cut connection": ("remote actor",),
    "partition": ("remote actor",),
    "packet loss": ("remote actor",),
}

_DURATIONS_S: dict[Kind, tuple[float, float]] = {
    "packet loss": (3.0, 8.0),
    "fill disk": (3.0, 8.0),
    "jump clock": (1.0, 5.0),
}
FIRST_STEP = 3
"""Before it there is nothing to disturb: the services are starting."""


class Fault(NamedTuple):
    """One thing that is done to a run."""

    kind: Kind
    target: Target
    at_step: int
    """It is committed once the run has made this optimizer step ..."""
    delay_s: float
    """... and so many seconds have passed: it may meet the learner anywhere in a step."""
    duration_s: float
    """How long it lasts; 0 for what is done in an instant."""
    seed: int
    """For whatever else is left to chance."""


def round_seed(seed: int, index: int) -> int:
    """The seed of a chaos run's round `index`."""
    return random.Random(f"{seed}/{index}").getrandbits(32)


def plan(seed: int, *, num_steps: int, dead_after_s: float) -> list[Fault]:
    """The faults of one round, in the order in which they happen: each kind once, spread over `num_steps`.

    Steps, not seconds, say when: so a slower machine sees the same faults. Half of the stops and partitions are shorter than
    `dead_after_s`, and half longer.
    """
    generator = random.Random(seed)
    kinds = generator.sample(KINDS, len(KINDS))
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
