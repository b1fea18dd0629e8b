"""The hub's address in a file that all machines see, for a learner that may move: it writes the file, the others read it.

`hub.address = "file:PATH"` names the file. A learner writes it once its hub is bound; actors read it when they look for one.
"""

import errno
import socket
from pathlib import Path

from offbeat.protocols.addresses import host_of

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
