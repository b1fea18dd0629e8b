"""Claims about the network of chaos: it parts, joins, loses packets, cuts connections, and leaves nothing."""

import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.chaos.network import Namespace, Network, Proxy, open_network

pytestmark = pytest.mark.slow

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs root")


class Echo:
    """A stand-in for the hub that sends back what it receives."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(1024):
                connection.sendall(data)
        except OSError:
            return


CALLER = """
import socket, sys
host, port = sys.argv[1].removeprefix("tcp://").split(":")
connection = socket.create_connection((host, int(port)))
print("connected", flush=True)
try:
    for line in sys.stdin:
        connection.sendall(line.encode())
        received = connection.recv(1024)
        if not received:
            raise ConnectionError
        print(received.decode().strip(), flush=True)
except OSError:
    print("cut", flush=True)
"""


class Caller:
    """A stand-in for the remote actor that sends lines to the hub and collects the answers."""

    def __init__(self, network: Network, port: int) -> None:
        self._process = subprocess.Popen(
            [*network.prefix, sys.executable, "-c", CALLER, network.hub_address(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def hears(self, text: str, timeout_s: float = 20.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while text not in self._lines and time.monotonic() < deadline:
            time.sleep(0.01)
        return text in self._lines

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.strip())


@pytest.mark.parametrize("kind", ["proxy", pytest.param("namespace", marks=needs_root)])
def test_network_parts_joins_loses_cuts_and_leaves_nothing(kind: str) -> None:
    network: Network = Namespace() if kind == "namespace" else Proxy()
    callers: list[Caller] = []
    echo = Echo(network.learner_host)
    try:
        caller = Caller(network, echo.port)
        callers.append(caller)
        assert caller.hears("connected")
        caller.say("before")
        assert caller.hears("before")
        network.part()
        time.sleep(0.1)
        caller.say("parted")
        assert not caller.hears("parted", 0.7)
        network.join()
        assert caller.hears("parted")
        network.lose_packets(0.5, time.sleep, random.Random(0))
        caller.say("joined")
        assert caller.hears("joined")
        network.cut()
        caller.say("more")
        assert caller.hears("cut")
        another = Caller(network, echo.port)
        callers.append(another)
        assert another.hears("connected")
    finally:
        for caller in callers:
            caller.close()
        echo.close()
        network.close()
    devices = Path("/proc/net/dev").read_text()
    assert f"ob{os.getpid()}a" not in devices
    assert "proxy" not in {thread.name for thread in threading.enumerate()}


def test_network_is_the_best_that_may_be_made() -> None:
    network = open_network()
    network.close()
    assert isinstance(network, Namespace if IS_ROOT else Proxy)
