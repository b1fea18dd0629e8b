"""The settings of an actor that is started with nothing but a learner's address: everything else comes from there.

RunRequest 0 -> RunPart 0 of n -> RunRequest 1 -> ... -> RunPart n - 1 -> digest -> settings and the model's small files
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from offbeat.actor.contact import FIRST_LOG_WAITING_S, LOG_WAITING_INTERVAL_S, RefusedError, receive_from_learner
from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.settings.config import Config, HubSection
from offbeat.common.settings.hub_keys import keys_of_peer
from offbeat.common.settings.loading import load, load_text
from offbeat.protocols.addresses import address_file, is_loopback
from offbeat.protocols.channels import Link
from offbeat.protocols.keys import KeyFileError, read_key_pair
from offbeat.protocols.message_parts import PART_BYTES, JoinSettings, JoinSettingsError, decode_join_settings
from offbeat.protocols.messages import Refused, RunPart, RunRequest, Stop
from offbeat.protocols.text import as_name
from offbeat.protocols.wire import Frame, FromLearner

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 5.0
"""Seconds without an answer after which a request is repeated: it may have been lost with its connection."""
LOOK_S = 0.1


class RunToJoin(NamedTuple):
    """The options of `offbeat actor` that name the run to join and the keys."""

    address: str
    """The hub's address, or `file:PATH`."""
    key: str
    """The actor's secret key file; empty: none."""
    learner_key: str
    """The learner's public key file; empty: none."""

    def overrides(self, name: str) -> list[str]:
        """Return the settings that these options stand for, and the actor's name."""
        values = {"hub.address": self.address, "hub.key": self.key, "hub.learner_key": self.learner_key, "actor.name": name}
        return [f"{setting}={value}" for setting, value in values.items()]


@contextlib.contextmanager
def joined(run: RunToJoin, overrides: Sequence[str]) -> Iterator[Config]:
    """Yield the settings of the run with `overrides` applied, and a model folder that is there within the context.

    Waits for the learner as `actor.connect_timeout_s` says.
    """
    _check(run)
    name = load(None, overrides).actor.name or _own_name(run.key)
    overrides = [*overrides, *run.overrides(name)]
    own = load(None, overrides)
    received = _receive(own.hub, name, own.actor.connect_timeout_s)
    with tempfile.TemporaryDirectory(prefix="offbeat-model-") as folder:
        # Their names have been checked.
        for file, content in received.files.items():
            Path(folder, file).write_bytes(content)
        logger.info("received the run's settings and %d files of the model from %s", len(received.files), run.address)
        yield _settings(received, [*overrides, f"model.path={folder}"])


def _check(run: RunToJoin) -> None:
    """Raise `SettingError` unless the learner will prove who it is, or only this machine can impersonate it."""
    if bool(run.key) != bool(run.learner_key):
        missing = "--learner-key" if run.key else "--key"
        raise SettingError(missing, "", "--key and --learner-key go together", "Give both: `offbeat keygen` makes them.")
    is_local = address_file(run.address) is not None or is_loopback(run.address)
    if not run.key and not is_local:
        problem = "an actor that joins runs what the settings name, so it must know the learner, and there are no keys"
        raise SettingError("--join", run.address, problem, "Give --key and --learner-key: `offbeat keygen` makes them.")


def _own_name(key: str) -> str:
    """Return the name of this actor: that of its key; the part that the key leaves open is the host and the process."""
    process = as_name(f"{socket.gethostname()}-{os.getpid()}")
    if not key or "{name}" in key:
        return process
    try:
        owner = read_key_pair(Path(key)).owner
    except KeyFileError as error:
        raise SettingError("--key", key, error.problem, error.cure) from error
    return owner.name.replace("*", process)


def _receive(hub: HubSection, name: str, patience_s: float) -> JoinSettings:
    keys = keys_of_peer(hub, name)
    identity = f"{name}/join-{uuid.uuid4().hex}".encode()
    limit = hub.max_message_mb << 20
    logger.info("asking the learner at %s for its run", hub.address)
    with Link(hub.address, identity=identity, max_message_bytes=limit, keys=keys) as link:
        return JoinReceiver(link, hub.address, patience_s=patience_s).receive()


def _settings(received: JoinSettings, overrides: Sequence[str]) -> Config:
    software = importlib.metadata.version("offbeat")
    try:
        return load_text(received.settings, overrides)
    except SettingError as error:
        if received.software == software:
            raise
        raise ServiceError(
            f"the settings of the run are not those of this release ({error}): the learner has offbeat {received.software}, "
            f"here is {software}. Install the same release"
        ) from error


class RunOverError(ServiceError):
    """The run is over: there is nothing to join."""


class JoinReceiver:
    """One conversation with the hub, which ends with the join settings."""

    def __init__(self, link: Link, address: str, *, patience_s: float) -> None:
        """Give up after `patience_s` in which the learner sent nothing of use; 0: wait forever."""
        self._link = link
        self._address = address
        self._patience_s = patience_s
        self._parts: list[bytes] = []
        self._num_parts: int | None = None
        self._digest = ""
        self._moved_at = time.monotonic()
        self._asked_at: float | None = None
        """Time of the request that is on its way, as far as is known; None without one."""

    def receive(self) -> JoinSettings:
        """Return the join settings of the run, checked.

        Consumes: parts. Waits for: the next one, looking every `LOOK_S`. Unblocked by: it, or `patience_s`. Raises
        `RefusedError` where the learner has no join settings for this actor or does not answer, `RunOverError` after the run.
        """
        log_at = time.monotonic() + FIRST_LOG_WAITING_S
        while len(self._parts) != self._num_parts:
            self._link.follow()
            self._ask()
            self._read()
            now = time.monotonic()
            if self._patience_s and now - self._moved_at > self._patience_s:
                raise RefusedError(f"{self._silence(now)} (actor.connect_timeout_s)")
            if now >= log_at:
                log_at = now + LOG_WAITING_INTERVAL_S
                logger.info("%s", self._silence(now))
        content = b"".join(self._parts)
        if hashlib.sha256(content).hexdigest() != self._digest:
            raise RefusedError(f"the learner at {self._address}: its run did not arrive as it was sent: start the actor again")
        try:
            return decode_join_settings(content)
        except JoinSettingsError as error:
            raise RefusedError(f"the learner at {self._address}: what it sent is no run: {error}") from error

    def _ask(self) -> None:
        now = time.monotonic()
        is_due = self._asked_at is None or now - self._asked_at >= ASK_AGAIN_S
        if is_due and self._link.send(RunRequest(index=len(self._parts))):
            self._asked_at = now

    def _read(self) -> None:
        match receive_from_learner(self._link, LOOK_S, self._address):
            case FromLearner(RunPart() as part, arrays):
                self._take(part, arrays[0])
            case FromLearner(Refused(reason=reason)):
                raise RefusedError(f"the learner at {self._address} does not accept --join: {reason}")
            case FromLearner(Stop(reason=reason)):
                raise RunOverError(f"the learner ended the run: {reason}")
            case _:
                pass

    def _take(self, part: RunPart, content: Frame) -> None:
        if self._digest not in ("", part.digest):
            # Another learner process, whose settings differ.
            self._parts.clear()
        self._digest, self._num_parts = part.digest, part.num_parts
        self._asked_at = None
        # A request that was repeated has two answers.
        if part.index == len(self._parts) and len(content) <= PART_BYTES:
            self._parts.append(bytes(content))
            self._moved_at = time.monotonic()

    def _silence(self, now: float) -> str:
        """Return who did not answer, for how long, and the likely reason."""
        reason = self._link.refusal()
        if reason is None:
            reason = "start it, or correct the address" if self._asked_at is None else "it is loading, or overloaded"
        progress = f" after {len(self._parts)} of {self._num_parts} parts of the run" if self._parts else ""
        return f"the learner at {self._address} did not answer for {now - self._moved_at:.0f} s{progress}: {reason}"
