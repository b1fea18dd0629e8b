"""CURVE keys of the services: their files, and the learner's list of those that may connect.

Both ends of a connection know each other's public key beforehand: the learner by `hub.allowed_keys`, everybody else by
`hub.learner_key`. All files are text, with z85 keys; the line of a `.pub` file is the line that belongs in the list.
"""

import fnmatch
import logging
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from offbeat.protocols.connection_limits import remember

logger = logging.getLogger(__name__)

Role = Literal["learner", "actor", "operator"]
LOOK_INTERVAL_S = 0.5
"""Seconds after which a changed allow-list is read again at the latest."""
Z85_KEY_CHARACTERS = 40


class KeyFileError(ValueError):
    """A key file that cannot be used; the text says what is wrong with it."""

    def __init__(self, path: Path, problem: str, cure: str) -> None:
        super().__init__(f"{path}: {problem}. {cure}")
        self.problem = problem
        self.cure = cure


class PublicKey(NamedTuple):
    """A public key and its owner; one line of an allow-list."""

    role: Role
    name: str
    """Name of the service. A name that ends in `*` stands for every service whose name begins with the rest."""
    public: bytes
    """z85, 40 characters."""

    def line(self) -> str:
        """Return the line that key files and allow-lists have."""
        return f"{self.role} {self.name} {self.public.decode()}"


class KeyPair(NamedTuple):
    """The keys with which a service proves that it is `owner`."""

    owner: PublicKey
    secret: bytes
    """z85, 40 characters."""


class Sender(NamedTuple):
    """The owner of the key that a message came under."""

    name: str = "*"
    """The actor's name, or a pattern for a fleet that shares a key: `fnmatch` decides."""
    role: Literal["actor", "operator"] | None = None
    """The peer's role; None without keys, when every peer may do everything."""

    def may_be(self, name: str) -> bool:
        """Return True when the service of this name may use the key."""
        return fnmatch.fnmatchcase(name, self.name)


NO_KEYS = Sender()


def make_key_pair(role: Role, name: str) -> KeyPair:
    """Return a new, random key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(PublicKey(role, name, public), secret)


def secret_text(key: KeyPair) -> str:
    """Return the content of a `.key` file."""
    role, name, _ = key.owner
    owner = f"the {role}" if name == role else f"the {role} {name}"
    return (
        f"# Secret key for {owner}, made by `offbeat keygen`. Anyone who can read it can impersonate the {role}.\n"
        f"{key.owner.line()}\nsecret {key.secret.decode()}\n"
    )


def public_text(key: PublicKey) -> str:
    """Return the content of a `.pub` file."""
    use = "hub.learner_key names this file." if key.role == "learner" else "The next line belongs in hub.allowed_keys."
    return f"# Public key of the {key.role} {key.name}, made by `offbeat keygen`. {use}\n{key.line()}\n"


def read_key_pair(path: Path) -> KeyPair:
    """Read a `.key` file. Raise `KeyFileError` if it is missing, damaged, or readable by every user of the machine."""
    lines = _read_lines(path)
    if stat.S_IMODE(path.stat().st_mode) & stat.S_IRWXO:
        raise KeyFileError(path, "every user of this machine can read the secret key", f"Run: chmod 600 {path}")
    match lines:
        case [(_, owner), (_, secret)] if secret.startswith("secret "):
            key = KeyPair(_parse(path, owner), secret.removeprefix("secret ").encode())
        case _:
            raise KeyFileError(path, "it is not a secret key file", "Name a .key file that `offbeat keygen` made.")
    if not _is_key(key.secret.decode()) or zmq.curve_public(key.secret) != key.owner.public:
        raise KeyFileError(path, "its secret and public keys do not belong together", "Make another with `offbeat keygen`.")
    return key


def read_public_key(path: Path) -> PublicKey:
    """Read a `.pub` file. Raise `KeyFileError` if it is missing or damaged."""
    match _read_lines(path):
        case [(_, line)]:
            return _parse(path, line)
        case _:
            raise KeyFileError(path, "it is not a public key file", "Name a .pub file that `offbeat keygen` made.")


def read_allowed_keys(path: Path) -> dict[bytes, Sender]:
    """Read an allow-list into a dict by public key. Raise `KeyFileError` that names the wrong line."""
    senders: dict[bytes, Sender] = {}
    for number, line in _read_lines(path):
        key = _parse(path, line, number)
        if key.role == "learner":
            problem = f"line {number} is the learner's own key"
            raise KeyFileError(path, problem, "The list has actors and operators; remove the line.")
        if key.public in senders:
            raise KeyFileError(
                path, f"line {number} has the same key as an earlier one", "Give each its own key, or remove one."
            )
        senders[key.public] = Sender(key.name, key.role)
    return senders


class AllowList:
    """The file of public keys that may connect. Changes of the file are noticed. Any thread may use it.

    While the file is missing or broken, the last good list stays in force.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = _signature(path)
        self._senders: Mapping[bytes, Sender] = read_allowed_keys(path)
        self._looked_at = clock()

    def sender(self, public_key: bytes) -> Sender | None:
        """Return the owner of a key; None when the key may not connect."""
        if self._clock() - self._looked_at >= LOOK_INTERVAL_S:
            self._look()
        return self._senders.get(public_key)

    def _look(self) -> None:
        with self._lock:
            self._looked_at = self._clock()
            # Taken before the file is read, so that a change during the reading is noticed next time.
            signature = _signature(self.path)
            if signature == self._seen:
                return
            self._seen = signature
            try:
                senders = read_allowed_keys(self.path)
            except KeyFileError as error:
                logger.error("hub.allowed_keys is left as it was: %s", error)
                return
            added, removed = len(senders.keys() - self._senders.keys()), len(self._senders.keys() - senders.keys())
            logger.info("hub.allowed_keys changed: %d keys added, %d revoked, %d in all", added, removed, len(senders))
            self._senders = senders


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with the file; None when there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines that are neither empty nor comments, with their numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise KeyFileError(path, "there is no such file", "Make it with `offbeat keygen`, or copy it here.") from error
    except OSError as error:
        raise KeyFileError(
            path, f"it cannot be read ({os.strerror(error.errno or 0)})", "Correct its path or rights."
        ) from error
    except UnicodeDecodeError as error:
        raise KeyFileError(path, "it is not text", "Name a file that `offbeat keygen` made.") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def _parse(path: Path, line: str, number: int = 0) -> PublicKey:
    where = f"line {number}" if number else "it"
    match line.split():
        case [role, name, public] if role in get_args(Role) and _is_key(public):
            return PublicKey(cast(Role, role), name, public.encode())
        case _:
            raise KeyFileError(path, f"{where} is not `ROLE NAME PUBLIC-KEY`", "Copy the line of a .pub file.")


def _is_key(text: str) -> bool:
    if len(text) != Z85_KEY_CHARACTERS:
        return False
    try:
        z85.decode(text)
    # Raised, in this order, for a character outside z85, one outside ASCII, and five that exceed 32 bits.
    except (KeyError, ValueError, struct.error):
        return False
    return True


class HubKeys(NamedTuple):
    """The keys of a `Hub`."""

    key: KeyPair
    allowed: AllowList
    """Those that may connect."""


class LinkKeys(NamedTuple):
    """The keys of a `Link`."""

    key: KeyPair
    learner_key: PublicKey
    """The key that the learner must own."""


ZAP_DOMAIN = "offbeat"
MAX_LOGGED_KEYS = 1000
"""Unknown keys that are logged by name; a stranger can make any number of them."""


class KeyCheck:
    """Makes a socket demand keys, and looks up whose key a connection uses."""

    def __init__(self, socket: zmq.Socket, keys: HubKeys, is_muted: Callable[[bytes], bool]) -> None:
        """Set up `socket`, which must not be bound yet. `is_muted(public_key)` is called on another thread."""
        self._allowed = keys.allowed
        self._is_muted = is_muted
        self._keys_of: dict[bytes, bytes] = {}
        """Public key by connection identity."""
        self._logged: set[bytes] = set()
        self._authenticator = ThreadAuthenticator(socket.context, log=logging.getLogger("zmq.auth"))
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.key.owner.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.key.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Handshakes fail when the authenticator is gone; otherwise anybody who knows the learner's public key would be let in.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def identify(self, first_frame: zmq.Frame) -> tuple[bytes, Sender | None]:
        """Return the public key that a message came under, and its owner; None for a key that was revoked."""
        key = cast(str, first_frame.get("User-Id")).encode()
        remember(self._keys_of, first_frame.bytes, key)
        # The handshake used the list of its time; the key may have been revoked since.
        return key, self._allowed.sender(key)

    def key_of(self, peer: bytes) -> bytes | None:
        """Return the public key of a connection heard before; None for one that was never heard, or is forgotten."""
        return self._keys_of.get(peer)

    def is_allowed(self, peer: bytes) -> bool:
        """Return True when messages may be sent to this connection."""
        key = self.key_of(peer)
        return key is not None and self._allowed.sender(key) is not None

    def close(self) -> None:
        """End the thread that answers handshakes."""
        self._authenticator.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True when the owner of this public key may connect. The authenticator's thread calls it by this name."""
        if self._allowed.sender(key) is not None:
            # A flooder that was cut off must not get back in with a new connection.
            return not self._is_muted(key)
        if key not in self._logged and len(self._logged) < MAX_LOGGED_KEYS:
            self._logged.add(key)
            logger.warning("refused the unknown key %s: %s does not have it", key.decode(), self._allowed.path)
        return False
