"""The hub's address as text, without a socket: its host, and whether other machines can reach it."""

import ipaddress


class ChannelError(RuntimeError):
    """A socket cannot be opened at an address; the text names the address and the cure."""


def host_of(address: str) -> str:
    """Return the host in `tcp://host:port`, without the brackets of an IPv6 address; `*` becomes `0.0.0.0`."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return "0.0.0.0" if host == "*" else host


def is_loopback(address: str) -> bool:
    """Return True when only this machine can reach `tcp://host:port`. Host names other than `localhost` are not trusted."""
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
