"""A pool: a place where actors are started and ended, such as this machine, a Slurm cluster or a Kubernetes Deployment."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from offbeat.common.errors import ServiceError


class PoolError(ServiceError):
    """The pool's machinery did not do what it was asked to; the same request may succeed later."""


class Instance(NamedTuple):
    """One actor of a pool."""

    name: str
    """Its name in the pool; the actor's name in the run, where the pool can choose that."""
    state: Literal["starting", "working", "leaving"]
    """`starting`: asked for, and not running yet. `leaving`: asked to end, and still there."""


class Pool(Protocol):
    """A place where actors are started and ended. Its methods do not wait for an actor, and raise `PoolError`."""

    def running(self) -> list[Instance]:
        """Return the pool's actors, oldest first, with those that start or leave."""
        ...

    def start(self, count: int) -> None:
        """Ask for this many more actors, under names that no other actor of the run has."""
        ...

    def release(self, names: Sequence[str]) -> None:
        """Ask these actors to leave (SIGTERM) and set no deadline: they finish what their own settings let them finish."""
        ...
