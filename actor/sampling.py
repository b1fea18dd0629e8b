"""The two ways in which a lease becomes a group: one turn and a reward function, or episodes of an environment."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from offbeat.actor.engines.engine import Completion
from offbeat.actor.rewards.functions import Reward
from offbeat.actor.rewards.retries import UnavailableRewards
from offbeat.common.models.images import ImagePatches
from offbeat.protocols.messages import Lease


class Played(NamedTuple):
    """The completions of a lease with their rewards, in the order of the group."""

    lease_id: int
    completions: tuple[Completion, ...]
    rewards: tuple[Reward, ...]
    generate_s: float
    """Seconds from the submission to the last completion's end; of episodes, with what their environment took."""
    reward_s: float = 0.0
    """Seconds from then on until all rewards were known; episodes come with theirs."""


class PlayFailure(NamedTuple):
    """A lease that cannot become a group."""

    lease_id: int
    reason: str
    """A word that the learner counts by: `reward_error`, `environment_timeout`."""
    detail: str
    """One line."""


class Play(Protocol):
    """Makes groups of leases with the engine. All methods are called from the engine's thread and never wait."""

    @property
    def is_waiting(self) -> bool:
        """True while something outside the engine is awaited: a reward, an environment."""
        ...

    def begin(self, lease: Lease, prompt_token_ids: list[int], images: Sequence[ImagePatches] = ()) -> None:
        """Begin a lease whose weights the engine has."""
        ...

    def add(self, completion: Completion) -> None:
        """Take a completion from the engine."""
        ...

    def poll(self) -> list[Played | PlayFailure]:
        """Return the leases that have ended since the last call, each once."""
        ...

    def cancel(self, lease_id: int) -> None:
        """Forget a lease, if it is here."""
        ...

    def trouble(self) -> UnavailableRewards | None:
        """Return which rewards are unavailable; None while none is."""
        ...

    @property
    def is_failing(self) -> bool:
        """True while most rewards or episodes fail for causes that may pass: no more leases should be taken."""
        ...

    def counts(self) -> dict[str, float]:
        """Return the counters of episodes as `ActorRow.environment` explains them; empty without an environment."""
        ...
