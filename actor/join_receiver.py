"""Asks a learner for its run: settings and the model's small files, for an actor that has neither.

RunRequest 0 -> RunPart 0 of n -> RunRequest 1 -> ... -> RunPart n - 1 -> digest -> join settings
"""

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from offbeat.actor.contact import LOG_WAITING_INTERVAL_S, RefusedError
from offbeat.common.errors import ServiceError
from offbeat.protocols.channels import Link
from offbeat.protocols.message_parts import PART_BYTES, JoinSettings, JoinSettingsError, decode_join_settings
from offbeat.protocols.messages import Credit, LearnerMessage, Refused, RunPart, RunRequest, SayHello, Stop
from offbeat.protocols.wire import Frame, UnknownMessageError, VersionError

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 5.0
"""Seconds without an answer after which a request is repeated: it may have been lost with its connection."""
LOOK_S = 0.1
MAX_GREETINGS = 2
"""Invitations to say hello, without a part, after which the learner is one that knows no `RunRequest`."""


class RunOverError(ServiceError):
    """The run is over: there is nothing to join."""


class JoinReceiver:
    """One conversation with the hub, which ends with the join settings."""

    def __init__(self, link: Link, address: str, *, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Give up after `patience_s` in which the learner sent nothing of use; 0: wait forever."""
        self._link = link
        self._address = address
        self._patience_s = patience_s
        self._clock = clock
        self._parts: list[bytes] = []
        self._num_parts: int | None = None
        self._digest = ""
        self._num_greetings = 0
        self._moved_at = clock()
        self._asked_at = float("-inf")
        self._is_asked = False
        """True while a request is on its way, as far as is known."""

    def receive(self) -> JoinSettings:
        """Return the join settings of the run, checked.

        Consumes: parts. Waits for: the next one, looking every `LOOK_S`. Unblocked by: it, or `patience_s`. Raises
        `RefusedError` where the learner has no join settings for this actor or does not answer, `RunOverError` after the run.
        """
        logged_at = self._clock()
        while len(self._parts) != self._num_parts:
            self._link.follow()
            self._ask()
            self._read()
            now = self._clock()
            if self._patience_s and now - self._moved_at > self._patience_s:
                raise RefusedError(f"{self._silence(now)} (actor.connect_timeout_s)")
            if now - logged_at > LOG_WAITING_INTERVAL_S:
                logged_at = now
                logger.info("%s", self._silence(now))
        content = b"".join(self._parts)
        if hashlib.sha256(content).hexdigest() != self._digest:
            raise RefusedError(f"the learner at {self._address}: its run did not arrive as it was sent: start the actor again")
        try:
            return decode_join_settings(content)
        except JoinSettingsError as error:
            raise RefusedError(f"the learner at {self._address}: what it sent is no run: {error}") from error

    def _ask(self) -> None:
        now = self._clock()
        if self._is_asked and now - self._asked_at < ASK_AGAIN_S:
            return
        if not self._link.send(RunRequest(index=len(self._parts))):
            return
        self._asked_at, self._is_asked = now, True
        if not self._parts:
            # A learner that does not know the request is silent; to this every one answers `SayHello`, in order.
            self._link.send(Credit(capacity=0))

    def _read(self) -> None:
        try:
            received = self._link.receive(LOOK_S)
        except UnknownMessageError as error:
            logger.debug("ignored: %s", error)
            return
        except VersionError as error:
            raise RefusedError(f"the learner at {self._address}: {error}") from error
        if received is not None:
            self._handle(received.message, received.arrays)

    def _handle(self, message: LearnerMessage, arrays: tuple[Frame, ...]) -> None:
        match message:
            case RunPart():
                self._take(message, arrays[0])
            case SayHello() if not self._parts:
                self._num_greetings += 1
                self._is_asked = False
                if self._num_greetings >= MAX_GREETINGS:
                    raise RefusedError(
                        f"the learner at {self._address} does not know --join: install the same release of offbeat there, or "
                        "give the actor the settings and the model's folder (offbeat actor run.toml)"
                    )
            case Refused():
                raise RefusedError(f"the learner at {self._address} hands out no run: {message.reason}")
            case Stop():
                raise RunOverError(f"the learner ended the run: {message.reason}")
            case _:
                pass

    def _take(self, part: RunPart, content: Frame) -> None:
        if self._digest not in ("", part.digest):
            # Another learner process, whose settings differ.
            self._parts.clear()
        self._digest, self._num_parts = part.digest, part.num_parts
        self._is_asked = False
        # A request that was repeated has two answers.
        if part.index == len(self._parts) and len(content) <= PART_BYTES:
            self._parts.append(bytes(content))
            self._moved_at = self._clock()

    def _silence(self, now: float) -> str:
        """Return who did not answer, for how long, and the likely reason."""
        reason = self._link.refusal()
        if reason is None:
            reason = "it is loading, or overloaded" if self._is_asked else "start it, or correct the address"
        progress = f" after {len(self._parts)} of {self._num_parts} parts of the run" if self._parts else ""
        return f"the learner at {self._address} did not answer for {now - self._moved_at:.0f} s{progress}: {reason}"


def write_files(received: JoinSettings, folder: Path) -> None:
    """Write the model's small files to a folder. Their names have been checked."""
    for name, content in received.files.items():
        (folder / name).write_bytes(content)
