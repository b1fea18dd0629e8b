"""The key files of a run: a pair for the learner, each actor and each operator, and the learner's allow-list."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from offbeat.common.errors import SettingError
from offbeat.common.records.run_folder import writing
from offbeat.common.settings.hub_keys import LEARNER, OPERATOR
from offbeat.protocols.keys import KeyPair, Role, make_key_pair, public_text, secret_text
from offbeat.protocols.text import is_name

ALLOWED_KEYS = "allowed_keys"
HEADER = """\
# The peers that may connect to the learner (hub.allowed_keys), one line each: role (actor or operator), name, public key.
# A name that ends in * stands for every actor whose name begins with it. To revoke a key, delete its line: a running learner
# notices within a second.
"""


def make_keys(folder: Path, actors: Sequence[str], operators: Sequence[str] = ()) -> list[KeyPair]:
    """Write `NAME.key`, `NAME.pub` and the lines of `allowed_keys`; return the new pairs.

    Includes the learner and an operator named `operator` when they have no keys yet. Raises `SettingError`, before anything is
    written, for an invalid name and for a pair that exists; later for a folder that cannot be written.
    """
    named: list[tuple[Role, str]] = [("actor", name) for name in actors if name != LEARNER]
    named.extend(("operator", name) for name in operators if name != OPERATOR)
    for _, name in named:
        _check_new(folder, name)
    # These two always get keys, named or not.
    always: tuple[tuple[Role, str], ...] = (("learner", LEARNER), ("operator", OPERATOR))
    named.extend((role, name) for role, name in always if not _secret_file(folder, name).exists())
    for stem, times in Counter(file_stem(name) for _, name in named).items():
        if times > 1:
            raise SettingError("NAME", stem, "two services would share one key file", "Give each another name.")
    pairs = [make_key_pair(role, name) for role, name in named]
    with writing(folder, "FOLDER"):
        folder.mkdir(parents=True, exist_ok=True)
        for pair in pairs:
            _write_secret(_secret_file(folder, pair.owner.name), secret_text(pair))
            _secret_file(folder, pair.owner.name).with_suffix(".pub").write_text(public_text(pair.owner))
        _allow(folder / ALLOWED_KEYS, [pair for pair in pairs if pair.owner.role != "learner"])
    return pairs


def file_stem(name: str) -> str:
    """Return the name of a service's key files without suffix: `gpu` for `gpu-*`."""
    return name.removesuffix("*").rstrip("-._") if name.endswith("*") else name


def instructions(folder: Path, pairs: Sequence[KeyPair]) -> str:
    """Return a text that lists the new files and says how to use them."""
    rows = "\n".join(f"  {_secret_file(folder, pair.owner.name)}  {pair.owner.role} {pair.owner.name}" for pair in pairs)
    return f"""\
made, each with its .pub:
{rows}
The run's TOML, the same for everybody ({{name}} becomes learner, the actor's name, or operator):
  [hub]
  key = "{folder}/{{name}}.key"
  learner_key = "{folder}/{LEARNER}.pub"
  allowed_keys = "{folder}/{ALLOWED_KEYS}"
An actor's machine needs that actor's .key and {LEARNER}.pub, nothing else. Copy them over a channel that you trust.
Actors that share a key (a name ending in *) set hub.key to its file instead of {{name}}."""


def _secret_file(folder: Path, name: str) -> Path:
    return folder / f"{file_stem(name)}.key"


def _check_new(folder: Path, name: str) -> None:
    """Raise `SettingError` for a name that no service can have, and for one that has a key."""
    if not is_name(name.removesuffix("*")):
        cure = "Use letters, digits, '.', '_', '@' and '-'; a '*' at the end is for a fleet that shares the key."
        raise SettingError("NAME", name, "this cannot be the name of a service and of a file", cure)
    for path in (_secret_file(folder, name), _secret_file(folder, name).with_suffix(".pub")):
        if path.exists():
            cure = f"To replace the key delete {path} and its line in {folder / ALLOWED_KEYS} first."
            raise SettingError("NAME", name, f"{path} exists, and keys are never overwritten", cure)


def _write_secret(path: Path, text: str) -> None:
    # Created with its final permissions, so that others can never open it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _allow(path: Path, pairs: Sequence[KeyPair]) -> None:
    """Append the pairs to the allow-list, in one write because a learner may read the file at any moment."""
    is_new = not path.exists()
    ends_in_line = is_new or path.read_bytes().endswith(b"\n") or path.stat().st_size == 0
    lines = "".join(f"{pair.owner.line()}\n" for pair in pairs)
    with path.open("a") as file:
        file.write((HEADER if is_new else "") + ("" if ends_in_line else "\n") + lines)
