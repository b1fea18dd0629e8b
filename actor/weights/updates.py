"""New weights at the actor: received beside the running engine, swapped in between two steps, checked with a canary.

learner -> announce -> WeightReceiver (thread) -> outcome -> commit -> canary's log-probs -> learner
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offbeat.actor.engines.engine import Engine
from offbeat.actor.weights.receiver import WeightReceiver
from offbeat.protocols import messages
from offbeat.protocols.channels import Link


@dataclass(eq=False)
class WeightUpdates:
    """The updates of one engine. It takes none before the first `join`."""

    _engine: Engine
    _send: Callable[..., bool]
    """`send(message, *arrays)` returns False when there is no connection now."""
    _open_pull_link: Callable[[str], Link]
    """Connects to the learner's weight server at an address."""
    _staying_in_touch: Callable[[], AbstractContextManager[None]]
    """The engine works inside this context, as a large model takes longer than the learner waits for a heartbeat."""
    recompute_kv: bool
    """`actor.on_update` is `recompute_kv`."""
    sends_routing: bool
    """The learner measures routing."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    _receiver: WeightReceiver | None = None
    _canary: list[int] = field(default_factory=list)
    _file_logprobs: NDArray[np.float32] | None = None
    """Log-probs of the canary under the model's files; None before the first `score_files`."""
    _owes_file_score: bool = False

    @property
    def is_busy(self) -> bool:
        """True while an update is announced, under way, or waiting for its commit."""
        return self._receiver is not None and self._receiver.is_busy

    def join(self, layout: tuple[messages.TensorSpec, ...], canary: list[int], *, is_another_learner: bool) -> None:
        """Prepare for updates of a learner that has just welcomed this actor; `canary` is its canary prompt.

        The engine may sleep. Call `score_files` once it is awake.
        """
        self._canary = canary
        self._owes_file_score = True
        if self._receiver is not None and self._receiver.layout == layout and not is_another_learner:
            return
        # Weights from the learner before must not be committed under a version number of this one.
        self.close()
        self._receiver = WeightReceiver(layout, self._open_pull_link)

    def score_files(self) -> None:
        """Send the learner that has welcomed this actor the score of the canary under the model's files, if there are some.

        The engine holds them until its first update.
        """
        if not self._owes_file_score:
            return
        self._owes_file_score = False
        if self._engine.policy_version is None and self._engine.info.has_weight_files:
            with self._staying_in_touch():
                self._file_logprobs = self._engine.score(self._canary).logprobs
        if self._file_logprobs is not None:
            self._send(messages.FilesScored(), self._file_logprobs)

    def announce(self, update: messages.WeightUpdate | messages.WeightPull) -> None:
        """Start to receive an update."""
        if self._receiver is not None:
            self._receiver.announce(update)

    def outcome(self) -> messages.WeightsStaged | None:
        """Return the transfer that ended since the last call. After a success, call `commit`."""
        return None if self._receiver is None else self._receiver.outcome()

    def commit(self, policy_version: int) -> None:
        """Swap in the received weights, report it, and score the canary under them."""
        assert self._receiver is not None
        started = self.clock()
        with self._staying_in_touch():
            self._engine.load_weights(self._receiver.buffer, policy_version, recompute_kv=self.recompute_kv)
        stall_s = self.clock() - started
        self._receiver.release()
        self._send(messages.WeightsCommitted(policy_version=policy_version, stall_s=stall_s))
        self._score_canary(policy_version)

    def close(self) -> None:
        """End the receiving thread."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _score_canary(self, policy_version: int) -> None:
        with self._staying_in_touch():
            score = self._engine.score(self._canary)
        self._send(messages.CanaryScored(policy_version=policy_version), score.logprobs)
        if score.routed_experts is not None and self.sends_routing:
            num_tokens, num_layers, top_k = score.routed_experts.shape
            routed = messages.CanaryRouted(
                policy_version=policy_version, num_tokens=num_tokens, num_layers=num_layers, top_k=top_k
            )
            self._send(routed, score.routed_experts)
