"""The settings of an actor that is started with nothing but a learner's address: everything else comes from there."""

import contextlib
import importlib.metadata
import logging
import os
import socket
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from offbeat.actor.join_receiver import JoinReceiver, write_files
from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.settings.config import Config, HubSection
from offbeat.common.settings.hub_keys import keys_of_peer
from offbeat.common.settings.loading import load, load_text
from offbeat.protocols.addresses import address_file, is_loopback
from offbeat.protocols.channels import Link
from offbeat.protocols.keys import KeyFileError, read_key_pair
from offbeat.protocols.message_parts import JoinSettings
from offbeat.protocols.text import as_name

logger = logging.getLogger(__name__)


class Meeting(NamedTuple):
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
def joined(meeting: Meeting, overrides: Sequence[str]) -> Iterator[Config]:
    """Yield the settings of the run with `overrides` applied, and a model folder that is there within the context.

    Waits for the learner as `actor.connect_timeout_s` says.
    """
    _check(meeting)
    name = load(None, overrides).actor.name or _own_name(meeting.key)
    overrides = [*overrides, *meeting.overrides(name)]
    own = load(None, overrides)
    received = _receive(own.hub, name, own.actor.connect_timeout_s)
    with tempfile.TemporaryDirectory(prefix="offbeat-model-") as folder:
        write_files(received, Path(folder))
        logger.info("received the run's settings and %d files of the model from %s", len(received.files), meeting.address)
        yield _settings(received, [*overrides, f"model.path={folder}"])


def _check(meeting: Meeting) -> None:
    """Raise `SettingError` unless the learner will prove who it is, or nobody but this machine can pose as it."""
    if bool(meeting.key) != bool(meeting.learner_key):
        missing = "--learner-key" if meeting.key else "--key"
        raise SettingError(missing, "", "--key and --learner-key go together", "Give both: `offbeat keygen` makes them.")
    is_local = address_file(meeting.address) is not None or is_loopback(meeting.address)
    if not meeting.key and not is_local:
        problem = "an actor that joins runs what the settings name, so it must know the learner, and there are no keys"
        raise SettingError("--join", meeting.address, problem, "Give --key and --learner-key: `offbeat keygen` makes them.")


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
    with Link(hub.address, identity=identity, max_message_bytes=limit, key=keys.key, learner_key=keys.learner_key) as link:
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
