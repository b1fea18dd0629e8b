"""Addresses of sockets, and the file by which a learner that may move tells its own.

`hub.address = "file:PATH"` names a file that all machines see. A learner writes it once its hub is bound; actors read it when
they look for a learner.
"""

import errno
import ipaddress
import socket
from pathlib import Path


class ChannelError(RuntimeError):
    """A socket cannot be opened at an address; the text names the address and the cure."""


def host_of(address: str) -> str:
    """Return the host in `tcp://host:port`, without the brackets of an IPv6 address; `*` becomes `0.0.0.0`."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return "0.0.0.0" if host == "*" else host


def is_ipv6(address: str) -> bool:
    """Return whether `tcp://host:port` has an IPv6 address. A socket for these would look names up as such first."""
    return "[" in address


def is_loopback(address: str) -> bool:
    """Return True when only this machine can reach `tcp://host:port`. Host names other than `localhost` are not trusted."""
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


PREFIX = "file:"
_WILDCARDS = ("0.0.0.0", "::")


def address_file(address: str) -> Path | None:
    """Return the file that `hub.address` names; None where it is an address itself."""
    return Path(address.removeprefix(PREFIX)) if address.startswith(PREFIX) else None


def find_address(address: str) -> str | None:
    """Return the address that `hub.address` stands for; None while its file is missing or empty."""
    file = address_file(address)
    if file is None:
        return address
    try:
        return file.read_text().strip() or None
    except OSError as error:
        # A file on NFS is stale for a moment when its machine replaces it.
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return None


def reachable(bound: str) -> str:
    """Return the address at which other machines reach a hub that was bound: of all interfaces, by this machine's name."""
    host = host_of(bound)
    return f"tcp://{socket.gethostname()}:{bound.rpartition(':')[2]}" if host in _WILDCARDS else bound
