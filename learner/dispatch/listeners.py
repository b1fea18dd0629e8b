"""The functions of the rest of the learner that the dispatcher calls."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from offbeat.protocols.messages import Hello, Vitals, WeightsCommitted, WeightsStaged


class CanaryVerdict(Protocol):
    """The judgement on an actor's log-probs of the canary."""

    @property
    def flaw(self) -> str | None:
        """The reason why they are wrong; None when they are right."""
        ...

    @property
    def is_certain(self) -> bool:
        """False for a verdict of right that the next version may overturn."""
        ...

    @property
    def agrees_with(self) -> Sequence[str]:
        """The other actors whose log-probs are wrong too, and the same as this one's."""
        ...


class Listeners(NamedTuple):
    """Functions of the rest of the learner, called in the hub's thread while the dispatcher's lock is held."""

    joined: Callable[[bytes, Hello], None]
    """An actor has joined: address, hello."""
    weights: Callable[[str, WeightsStaged | WeightsCommitted], None]
    """The actor of this name has staged or committed weights."""
    canary: Callable[[str, int, np.ndarray], CanaryVerdict | None]
    """Judges an actor's score of the canary: name, policy version, float32 log-probs `[num_tokens - 1]`. Returns None where
    the version can no longer be judged."""
    files_scored: Callable[[str, np.ndarray], None]
    """An actor has scored the canary under the model's files: name, float32 log-probs `[num_tokens - 1]`."""
    routed: Callable[[str, int, np.ndarray], None]
    """An actor has routed the canary: name, policy version, int32 experts `[num_tokens - 1, num_layers, top_k]`."""
    distrusted: Callable[[bytes, str, str], None]
    """An actor's weights are not what it says: address, name, reason."""
    vitals: Callable[[], Vitals] = Vitals
    """Returns the newest step in short, and what is not well."""
    weight_problems: Callable[[], list[str]] = list
    """Returns what an operator should know about the transfer of weights."""
    advice: Callable[[], list[str]] = list
    """Returns what the run needs instead of more actors."""
    hub_rejections: Callable[[], dict[str, int]] = dict
    """Returns the number of messages that the hub has turned away, by reason."""
