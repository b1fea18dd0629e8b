"""The network between the learner and chaos's remote actor: faults cut it, part it, and make it lose packets.

As root the actor runs in a network namespace at the other end of a veth pair, so that both hub and weight traffic can be
disturbed. Without root the actor reaches the hub through a TCP proxy on loopback, and its weights bypass the proxy.
"""

import asyncio
import contextlib
import os
import random
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

Pause = Callable[[float], None]
"""A function that waits the given number of seconds."""

LOSS = "20%"
"""Share of the packets that netem drops in each direction."""
FLAP_DOWN_S = (0.02, 0.15)
FLAP_UP_S = (0.05, 0.4)
"""Shortest and longest time for which a flapping link is down or up, in seconds."""


class Network(Protocol):
    """The remote actor's way to the learner."""

    description: str
    learner_host: str
    """The learner's address for all services."""
    prefix: list[str]
    """Words to put before the remote actor's command."""

    def hub_address(self, port: int) -> str:
        """Return the address at which the remote actor reaches the hub that listens on `port` of `learner_host`."""
        ...

    def cut(self) -> None:
        """Break the connections; new ones may be made at once."""
        ...

    def part(self) -> None:
        """Stop all traffic until `join`."""
        ...

    def join(self) -> None:
        """Let traffic through again."""
        ...

    def lose_packets(self, duration_s: float, pause: Pause, generator: random.Random) -> None:
        """Lose a share of the packets for `duration_s` seconds."""
        ...

    def close(self) -> None:
        """Remove the network from this machine."""
        ...


def open_network() -> Network:
    """Make a namespace where this process may, else a proxy."""
    if os.geteuid() == 0 and shutil.which("ip") and shutil.which("ss"):
        with contextlib.suppress(subprocess.CalledProcessError):
            return Namespace()
    return Proxy()


class Namespace:
    """A network namespace and a veth pair, both named after this process."""

    def __init__(self) -> None:
        pid = os.getpid()
        self._name = f"offbeat{pid}"
        self._outside, self._inside = f"ob{pid}a", f"ob{pid}b"
        # 198.18.0.0/15 is reserved for network tests; every process takes four addresses of it.
        start = (198 << 24) + (18 << 16) + pid % (1 << 15) * 4
        self.learner_host, self._actor_host = (socket.inet_ntoa((start + index).to_bytes(4)) for index in (1, 2))
        self.prefix = ["ip", "netns", "exec", self._name]
        try:
            _run("ip", "netns", "add", self._name)
            _run("ip", "link", "add", self._outside, "type", "veth", "peer", "name", self._inside, "netns", self._name)
            _run("ip", "addr", "add", f"{self.learner_host}/30", "dev", self._outside)
            _run("ip", "link", "set", self._outside, "up")
            _run(*self.prefix, "ip", "addr", "add", f"{self._actor_host}/30", "dev", self._inside)
            _run(*self.prefix, "ip", "link", "set", "lo", "up")
            self.join()
        except subprocess.CalledProcessError:
            self.close()
            raise
        self._has_netem = self._try_netem()
        loses = f"netem loss {LOSS}" if self._has_netem else "rapid link flapping (no netem here)"
        self.description = f"network namespace, packet loss by {loses}"

    def hub_address(self, port: int) -> str:
        return f"tcp://{self.learner_host}:{port}"

    def cut(self) -> None:
        _run("ss", "-K", "dst", self._actor_host)

    def part(self) -> None:
        # Down at the actor's end: the learner's end must keep its address for the local actor.
        _run(*self.prefix, "ip", "link", "set", self._inside, "down")

    def join(self) -> None:
        _run(*self.prefix, "ip", "link", "set", self._inside, "up")

    def lose_packets(self, duration_s: float, pause: Pause, generator: random.Random) -> None:
        if not self._has_netem:
            _flap(self, duration_s, pause, generator)
            return
        ends = [["tc", "qdisc", "{}", "dev", self._outside], [*self.prefix, "tc", "qdisc", "{}", "dev", self._inside]]
        for end in ends:
            _run(*(word.format("replace") for word in end), "root", "netem", "loss", LOSS)
        pause(duration_s)
        for end in ends:
            _run(*(word.format("del") for word in end), "root")

    def close(self) -> None:
        # Deleting the namespace deletes the pair, but only once one end has been moved into it.
        for command in (["ip", "link", "del", self._outside], ["ip", "netns", "del", self._name]):
            subprocess.run(command, capture_output=True, check=False)

    def _try_netem(self) -> bool:
        try:
            _run("tc", "qdisc", "add", "dev", self._outside, "root", "netem", "loss", "0%")
        except (subprocess.CalledProcessError, FileNotFoundError):
            return False
        _run("tc", "qdisc", "del", "dev", self._outside, "root")
        return True


class Proxy:
    """A TCP proxy in front of the hub, which runs in its own thread."""

    description = "TCP proxy before the hub (no network namespace without root), packet loss by rapid stalling"
    learner_host = "127.0.0.1"

    def __init__(self) -> None:
        self.prefix: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._hub_port = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self._port = self._server.sockets[0].getsockname()[1]

    def hub_address(self, port: int) -> str:
        self._hub_port = port
        return f"tcp://127.0.0.1:{self._port}"

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._abort_all)

    def part(self) -> None:
        self._loop.call_soon_threadsafe(self._is_open.clear)

    def join(self) -> None:
        self._loop.call_soon_threadsafe(self._is_open.set)

    def lose_packets(self, duration_s: float, pause: Pause, generator: random.Random) -> None:
        _flap(self, duration_s, pause, generator)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self.join()
        self.cut()
        self._call(_end_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(5.0)

    def _abort_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hub_reader, hub_writer = await asyncio.open_connection("127.0.0.1", self._hub_port)
        except OSError:
            # The learner is not running.
            writer.transport.abort()
            return
        both = {writer, hub_writer}
        self._writers |= both
        await asyncio.gather(self._pump(reader, hub_writer), self._pump(hub_reader, writer))
        self._writers -= both

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._is_open.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


async def _end_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _flap(network: Network, duration_s: float, pause: Pause, generator: random.Random) -> None:
    """Part and join repeatedly for `duration_s` seconds: TCP must send again what is lost in between."""
    left_s = duration_s
    while left_s > 0:
        for act, bounds in ((network.part, FLAP_DOWN_S), (network.join, FLAP_UP_S)):
            act()
            wait_s = generator.uniform(*bounds)
            pause(wait_s)
            left_s -= wait_s


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
