"""The keys that a service needs for the hub, from its settings: one TOML file serves everybody, `hub.key` may hold `{name}`."""

from pathlib import Path
from typing import Literal

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import HubSection
from offbeat.protocols.keys import AllowList, HubKeys, KeyFileError, KeyPair, LinkKeys, Sender, read_key_pair, read_public_key

LEARNER = "learner"
"""Replaces `{name}` in `hub.key` at the learner."""
OPERATOR = "operator"
"""Replaces `{name}` in `hub.key` for an operator without another name."""


def keys_of_learner(hub: HubSection) -> HubKeys | None:
    """Return the keys for every socket that the learner binds, if any. Raise `SettingError` for a file that cannot be used."""
    if not hub.key:
        return None
    key = _read_own(hub, LEARNER, "learner")
    try:
        return HubKeys(key, AllowList(Path(hub.allowed_keys)))
    except KeyFileError as error:
        raise SettingError("hub.allowed_keys", hub.allowed_keys, error.problem, error.cure) from error


def keys_of_peer(hub: HubSection, name: str, role: Literal["actor", "operator"] = "actor") -> LinkKeys | None:
    """Return the keys for sockets that connect to the learner, if any. Raise `SettingError` for a file that cannot be used."""
    if not hub.key:
        return None
    key = _read_own(hub, name, role)
    if role == "actor" and not Sender(key.owner.name, "actor").may_be(name):
        problem = f"the key file {_path(hub, name)} is for {key.owner.name!r}, and the learner would refuse another name"
        raise SettingError("actor.name", name, problem, "Set actor.name, or hub.key to this actor's key file.")
    try:
        learner_key = read_public_key(Path(hub.learner_key))
    except KeyFileError as error:
        raise SettingError("hub.learner_key", hub.learner_key, error.problem, error.cure) from error
    if learner_key.role != "learner":
        problem = f"it is the key of the {learner_key.role} {learner_key.name}, not of a learner"
        raise SettingError("hub.learner_key", hub.learner_key, problem, "Name the learner's .pub file.")
    return LinkKeys(key, learner_key)


def _read_own(hub: HubSection, name: str, role: str) -> KeyPair:
    path = _path(hub, name)
    try:
        key = read_key_pair(path)
    except KeyFileError as error:
        raise SettingError("hub.key", str(path), error.problem, error.cure) from error
    if key.owner.role != role:
        problem = f"it is the key of the {key.owner.role} {key.owner.name}, and this is the {role} {name}"
        raise SettingError("hub.key", str(path), problem, "Name this service's own key, or write {name} into the path.")
    return key


def _path(hub: HubSection, name: str) -> Path:
    return Path(hub.key.replace("{name}", name))
