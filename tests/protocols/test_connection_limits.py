"""Strangers at the hub's connection limit cannot take the descriptors that the process and honest peers need."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from offbeat.common.processes.files import patiently, raise_limit
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.keys import LinkKeys, make_key_pair, public_text, secret_text
from offbeat.protocols.messages import Credit, SayHello
from tests.protocols.sockets import ANY_PORT, LIMIT, PATIENCE_S, eventually, introduce, port_of

NUM_FILES = 256
NUM_STRANGERS = 1500


@contextlib.contextmanager
def strangers(port: int) -> Iterator[list[socket.socket]]:
    """Give a list to which `knock` adds silent connections, closed at the end."""
    connections: list[socket.socket] = []
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def knock(connections: list[socket.socket], port: int, number: int) -> None:
    for _ in range(number):
        connection = socket.socket()
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.connect(("127.0.0.1", port))
        connections.append(connection)


def ask(link: Link) -> bool:
    """Return whether the hub answers a message within a second; the link may have to connect again first."""
    link.send(Credit(capacity=1))
    received = link.receive(1.0)
    return received is not None and received.message == SayHello()


@pytest.mark.slow
def test_silent_connections_end_no_keyed_hub_and_honest_peers_get_through(tmp_path: Path) -> None:
    learner, actor = make_key_pair("learner", "learner"), make_key_pair("actor", "a")
    secret = tmp_path / "learner.key"
    secret.write_text(secret_text(learner))
    secret.chmod(0o600)
    (tmp_path / "allowed_keys").write_text(public_text(actor.owner))
    command = [sys.executable, "-m", "tests.protocols.crowded_hub", str(tmp_path), str(NUM_FILES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        port = int(process.stdout.readline())
        raise_limit()
        keys = LinkKeys(actor, learner.owner)
        with strangers(port) as connections:
            knock(connections, port, NUM_STRANGERS // 3)
            with Link(f"tcp://127.0.0.1:{port}", identity=b"a", max_message_bytes=LIMIT, keys=keys) as link:
                # While strangers keep coming, and afterwards.
                for _ in range(NUM_STRANGERS // 50):
                    knock(connections, port, 2 * NUM_STRANGERS // 3 // (NUM_STRANGERS // 50))
                    time.sleep(0.02)
                eventually(lambda: ask(link))
                eventually(lambda: ask(link))
            with Link(f"tcp://127.0.0.1:{port}", identity=b"b", max_message_bytes=LIMIT, keys=keys) as another:
                eventually(lambda: ask(another))
        process.stdin.close()
        said, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 0, errors
    num_answered, num_written, num_closed = map(int, said.split())
    assert num_answered >= 3
    assert num_written > 0
    assert num_closed > NUM_STRANGERS // 2
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_oldest_stranger_is_closed_and_a_peer_that_spoke_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only told to the hub: the process of many tests has more descriptors open.
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (96, 96))
    # A third of 96 descriptors: 8 strangers and 24 peers that have spoken.
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub:
        assert hub.connections.max_known == 24
        with Link(hub.address, identity=b"a", max_message_bytes=LIMIT) as link, strangers(port_of(hub)) as connections:
            introduce(hub, link)
            # Its connection must be known before others come.
            eventually(lambda: hub.connections._known or introduce(hub, link) is None)
            knock(connections, port_of(hub), 8)
            time.sleep(0.05)
            assert hub.connections.num_closed == 0
            knock(connections, port_of(hub), 3)
            eventually(lambda: hub.connections.num_closed == 3)
            for connection in connections[:3]:
                connection.settimeout(PATIENCE_S)
                # ZeroMQ greets first, then the connection ends.
                while connection.recv(100):
                    pass
            assert introduce(hub, link).peer == b"a"


def test_kernel_watches_over_the_connections_of_the_hub_and_closes_those_of_dead_machines() -> None:
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub, Link(hub.address, identity=b"a", max_message_bytes=LIMIT) as link:
        introduce(hub, link)
        connections = psutil.Process().net_connections("tcp")
        accepted = [one.fd for one in connections if one.raddr and one.laddr.port == port_of(hub)]
        assert accepted
        for descriptor in accepted:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                idle, interval, probes = (
                    connection.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle + interval * probes == 120


def test_opening_waits_for_a_descriptor_and_gives_up_for_other_reasons(tmp_path: Path) -> None:
    calls: list[int] = []

    def opens_at_the_third_try() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise OSError(24, os.strerror(24))
        return 7

    assert patiently(opens_at_the_third_try) == 7
    with pytest.raises(FileNotFoundError):
        patiently(lambda: (tmp_path / "absent").read_bytes())


def test_soft_limit_is_raised_to_the_hard_one() -> None:
    code = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, 512)); "
        "from offbeat.common.processes.files import raise_limit; "
        "print(raise_limit(), *r.getrlimit(r.RLIMIT_NOFILE))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["512", "512", "512"]
