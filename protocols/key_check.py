"""The hub's key check: only public keys on the allow-list may connect, and every message is attributed to one of them."""

import logging
from collections.abc import Callable
from typing import cast

import zmq
from zmq.auth.thread import ThreadAuthenticator

from offbeat.protocols.flood_guard import remember
from offbeat.protocols.keys import AllowList, KeyPair, Sender

logger = logging.getLogger(__name__)

ZAP_DOMAIN = "offbeat"
MAX_LOGGED_KEYS = 1000
"""Unknown keys that are logged by name; a stranger can make any number of them."""


class KeyCheck:
    """Makes a socket demand keys, and looks up whose key a connection uses."""

    def __init__(self, socket: zmq.Socket, key: KeyPair, allowed: AllowList, is_muted: Callable[[bytes], bool]) -> None:
        """Set up `socket`, which must not be bound yet. `is_muted(public_key)` is called on another thread."""
        self._allowed = allowed
        self._keys_of: dict[bytes, bytes] = {}
        """Public key by connection identity."""
        self._authenticator = ThreadAuthenticator(socket.context, log=logging.getLogger("zmq.auth"))
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=_Doorkeeper(allowed, is_muted))
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.owner.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
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


class _Doorkeeper:
    """Decides about each handshake, on the authenticator's thread."""

    def __init__(self, allowed: AllowList, is_muted: Callable[[bytes], bool]) -> None:
        self._allowed = allowed
        self._is_muted = is_muted
        self._logged: set[bytes] = set()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True when the owner of this public key may connect. The library calls it by this name."""
        if self._allowed.sender(key) is not None:
            # A flooder that was cut off must not get back in with a new connection.
            return not self._is_muted(key)
        if key not in self._logged and len(self._logged) < MAX_LOGGED_KEYS:
            self._logged.add(key)
            logger.warning("turned away the unknown key %s: %s does not have it", key.decode(), self._allowed.path)
        return False
