"""Two machines on one: network namespaces joined by a cable, or two addresses of loopback where no namespace can be made."""

import ctypes
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SOURCE_PORTS = (40_000, 40_999)
"""The ports that the kernel gives to a socket that asks for none."""


class Machines(NamedTuple):
    """Two machines that reach each other."""

    hosts: tuple[str, str]
    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    """Words before a command that make it run on each machine."""
    are_apart: bool
    """False: both are this machine, and share its ports."""


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Yield two machines. Needs no rights of root where the kernel lets users make namespaces; else warns and uses loopback."""
    holders: list[subprocess.Popen[bytes]] = []
    try:
        try:
            machines = _join_namespaces(holders)
        except (OSError, subprocess.CalledProcessError) as error:
            warnings.warn(f"two addresses of loopback stand for two machines: no network namespaces ({error})", stacklevel=3)
            machines = Machines(("127.0.0.2", "127.0.0.3"), ((), ()), are_apart=False)
        yield machines
    finally:
        for holder in reversed(holders):
            holder.kill()
            holder.wait()


def _join_namespaces(holders: list[subprocess.Popen[bytes]]) -> Machines:
    """Make a namespace for each machine, held by a process, and a cable between the two."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            raise FileNotFoundError(f"there is no {program}")
    first = _hold(holders, "unshare", "--user", "--map-root-user", "--net")
    enter = ("nsenter", "--preserve-credentials", "--user", "--net", "--target")
    second = _hold(holders, *enter, str(first), "unshare", "--net")
    prefixes = (*enter, str(first)), (*enter, str(second))
    hosts = ("198.18.0.1", "198.18.0.2")
    _run(*prefixes[0], "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(second))
    for prefix, host in zip(prefixes, hosts, strict=True):
        _run(*prefix, "ip", "addr", "add", f"{host}/30", "dev", "cable")
        _run(*prefix, "ip", "link", "set", "cable", "up")
        _run(*prefix, "ip", "link", "set", "lo", "up")
        ports = " ".join(map(str, SOURCE_PORTS))
        _run(*prefix, "sh", "-c", f"echo {ports} > /proc/sys/net/ipv4/ip_local_port_range")
    return Machines(hosts, prefixes, are_apart=True)


def _hold(holders: list[subprocess.Popen[bytes]], *prefix: str) -> int:
    """Start a process that keeps a namespace, and return its id once it is in it."""
    holder = subprocess.Popen([*prefix, "sh", "-c", "echo; exec sleep 3600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    holders.append(holder)
    assert holder.stdout is not None and holder.stderr is not None
    if not holder.stdout.read(1):
        raise OSError(holder.stderr.read().decode().strip())
    return holder.pid


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def move_to(prefix: Sequence[str]) -> None:
    """Move this process, which must have no threads, to the machine of the prefix."""
    kernel = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "net") if prefix else ():
        with Path(f"/proc/{prefix[-1]}/ns/{kind}").open() as namespace:
            if kernel.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def cut_cable(machines: Machines) -> None:
    """Cut the cable between two machines that are apart: what is sent is lost, and no one is told."""
    _run(*machines.prefixes[1], "ip", "link", "set", "cable", "down")


def listening_ports(prefix: Sequence[str]) -> set[int]:
    """Return the TCP ports that a machine's processes listen at, on any address but loopback's."""
    lines = subprocess.run([*prefix, "ss", "-Hltn"], check=True, capture_output=True, text=True).stdout.splitlines()
    addresses = [line.split()[3].rpartition(":") for line in lines]
    return {int(port) for host, _, port in addresses if not host.startswith(("127.", "[::1]"))}
