"""The weight server and its pullers over real sockets, with a proxy that cuts connections and corrupts bytes."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from offbeat.actor.weights import pull as weight_pull
from offbeat.actor.weights.pull import MAX_DAMAGED, WINDOW
from offbeat.actor.weights.receiver import WeightReceiver
from offbeat.common.weights.flat import checksum, make_layout
from offbeat.learner.weights.server import MAX_SERVINGS, WeightServer
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import Chunk, ChunkGone, ChunkRequest, Credit, LearnerMessage, WeightPull, WeightsStaged
from offbeat.protocols.wire import Array

pytestmark = pytest.mark.slow

LAYOUT = make_layout([("w", (1 << 18,))], torch.float32)
CHUNK_BYTES = 1 << 15
NUM_CHUNKS = 32
PEER = b"actor/1"
VERSION = 7
PATIENCE_S = 30.0


def open_hub() -> Hub:
    return Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 12)


def open_link(address: str) -> Link:
    return Link(address, identity=PEER, max_message_bytes=1 << 20)


@pytest.fixture
def server() -> Iterator[WeightServer]:
    """Yield a server that lends random bytes as `VERSION` and has admitted `PEER`."""
    failures: list[BaseException] = []
    server = WeightServer(open_hub=open_hub, chunk_bytes=CHUNK_BYTES)
    server.start(tend=lambda: None, on_failure=failures.append)
    server.lend(VERSION, FLAT)
    server.admit(PEER)
    yield server
    server.close()
    assert not failures
    assert server._thread is not None
    assert not server._thread.is_alive()


FLAT = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Proxy:
    """A proxy between a puller and the server. `tamper` replaces the server's bytes; None cuts the connection."""

    def __init__(self, port: int, tamper: Callable[[int, bytearray], bytearray | None]) -> None:
        self._to = ("127.0.0.1", port)
        self._tamper = tamper
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_connections = 0
        self._num_bytes = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.num_connections += 1
                upstream = socket.create_connection(self._to)
                self._sockets += [client, upstream]
                for source, target in ((client, upstream), (upstream, client)):
                    thread = threading.Thread(target=self._carry, args=(source, target, source is upstream), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, target: socket.socket, is_from_server: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(8192)):
                carried: bytearray | None = data
                if is_from_server:
                    carried = self._tamper(self._num_bytes, data)
                    self._num_bytes += len(data)
                if carried is None:
                    break
                target.sendall(carried)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@contextlib.contextmanager
def proxy_to(server: WeightServer, tamper: Callable[[int, bytearray], bytearray | None]) -> Iterator[Proxy]:
    proxy = Proxy(server.port, tamper)
    try:
        yield proxy
    finally:
        proxy.close()


@pytest.fixture
def receiver() -> Iterator[WeightReceiver]:
    receiver = WeightReceiver(LAYOUT, open_link)
    yield receiver
    receiver.close()
    assert not receiver._thread.is_alive()


def pull_from(port: int, *, expected: int | None = None, timeout_s: float = PATIENCE_S, version: int = VERSION) -> WeightPull:
    return WeightPull(
        policy_version=version,
        host="127.0.0.1",
        port=port,
        num_bytes=len(FLAT),
        chunk_bytes=CHUNK_BYTES,
        checksum=checksum(FLAT) if expected is None else expected,
        timeout_s=timeout_s,
    )


def outcome_of(receiver: WeightReceiver, pull: WeightPull) -> WeightsStaged:
    receiver.announce(pull)
    deadline = time.monotonic() + PATIENCE_S
    while (outcome := receiver.outcome()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return outcome


def error_of(receiver: WeightReceiver, pull: WeightPull) -> str:
    error = outcome_of(receiver, pull).error
    assert error is not None
    return error


def test_pulled_version_is_the_servers_byte_for_byte(server: WeightServer, receiver: WeightReceiver) -> None:
    outcome = outcome_of(receiver, pull_from(server.port))
    assert outcome == WeightsStaged(policy_version=VERSION, epoch=-1)
    assert torch.equal(receiver.buffer.flat, FLAT)
    assert server.visitor(PEER).num_requests == NUM_CHUNKS


def test_pull_goes_on_with_the_missing_chunks_after_its_connection_was_cut(
    server: WeightServer, receiver: WeightReceiver
) -> None:
    was_cut = threading.Event()

    def cut_half_way(num_bytes: int, data: bytearray) -> bytearray | None:
        if num_bytes < len(FLAT) // 2 or was_cut.is_set():
            return data
        was_cut.set()
        return None

    with proxy_to(server, cut_half_way) as proxy:
        outcome = outcome_of(receiver, pull_from(proxy.port))
        assert outcome.error == ""
        assert torch.equal(receiver.buffer.flat, FLAT)
        assert proxy.num_connections == 2
    assert server.visitor(PEER).num_requests <= NUM_CHUNKS + WINDOW


def flip(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 1
    return data


def test_damaged_chunk_is_asked_for_again(server: WeightServer, receiver: WeightReceiver) -> None:
    damaged = threading.Event()

    def flip_once(num_bytes: int, data: bytearray) -> bytearray:
        # A full read half-way through a chunk is all payload.
        if num_bytes < CHUNK_BYTES + CHUNK_BYTES // 4 or num_bytes % CHUNK_BYTES > CHUNK_BYTES // 2 or damaged.is_set():
            return data
        damaged.set()
        return flip(data)

    with proxy_to(server, flip_once) as proxy:
        outcome = outcome_of(receiver, pull_from(proxy.port))
    assert damaged.is_set()
    assert outcome.error == ""
    assert torch.equal(receiver.buffer.flat, FLAT)
    assert server.visitor(PEER).num_requests == NUM_CHUNKS + 1


def test_chunk_that_is_damaged_every_time_ends_the_pull_with_an_error(server: WeightServer, receiver: WeightReceiver) -> None:
    def flip_payload(num_bytes: int, data: bytearray) -> bytearray:
        return flip(data) if num_bytes > 4096 and len(data) > 4096 else data

    with proxy_to(server, flip_payload) as proxy:
        error = error_of(receiver, pull_from(proxy.port))
    assert f"came damaged {MAX_DAMAGED} times" in error
    assert f"127.0.0.1:{proxy.port}" in error


def test_version_whose_whole_checksum_is_not_the_announced_one_is_refused(
    server: WeightServer, receiver: WeightReceiver
) -> None:
    outcome = outcome_of(receiver, pull_from(server.port, expected=checksum(FLAT) ^ 1))
    assert outcome.error == f"wrong checksum: {checksum(FLAT):08x} arrived, {checksum(FLAT) ^ 1:08x} was announced"


def test_error_leaves_the_buffer_free_for_the_next_pull(server: WeightServer, receiver: WeightReceiver) -> None:
    assert outcome_of(receiver, pull_from(server.port, version=VERSION + 1)).error
    assert outcome_of(receiver, pull_from(server.port)).error == ""


def test_version_that_is_not_lent_is_gone(server: WeightServer, receiver: WeightReceiver) -> None:
    server.withdraw()
    assert "does not offer version 7 any longer" in error_of(receiver, pull_from(server.port))


def test_actor_that_is_not_admitted_gets_nothing(server: WeightServer, receiver: WeightReceiver) -> None:
    server.dismiss(PEER)
    assert "does not offer version 7 any longer" in error_of(receiver, pull_from(server.port))
    assert not receiver.buffer.flat.any()


def test_buffer_of_another_size_is_refused_before_anything_is_asked(server: WeightServer) -> None:
    receiver = WeightReceiver(make_layout([("w", (5,))], torch.float32), open_link)
    assert "do not fit a buffer of 64" in error_of(receiver, pull_from(server.port))
    receiver.close()
    assert server.visitor(PEER).num_requests == 0


def test_server_that_does_not_answer_is_named() -> None:
    receiver = WeightReceiver(LAYOUT, open_link)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        error = error_of(receiver, pull_from(port, timeout_s=0.3))
        receiver.close()
    source = f"the weight server at 127.0.0.1:{port} (weights.pull_port)"
    assert error.startswith(f"no chunk from {source} within 0.3 s (weights.timeout_s)")


def test_pull_that_a_newer_announcement_replaces_is_no_news(server: WeightServer, receiver: WeightReceiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        receiver.announce(pull_from(silent.getsockname()[1], version=VERSION - 1))
        while receiver._announced is not None:
            time.sleep(0.002)
        outcome = outcome_of(receiver, pull_from(server.port))
    assert outcome == WeightsStaged(policy_version=VERSION, epoch=-1)


def test_pull_ends_when_the_receiver_is_closed() -> None:
    receiver = WeightReceiver(LAYOUT, open_link)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        receiver.announce(pull_from(silent.getsockname()[1]))
        while receiver._announced is not None:
            time.sleep(0.002)
        receiver.close()
    assert not receiver._thread.is_alive()


def ask(link: Link, index: int, version: int = VERSION) -> Chunk | ChunkGone:
    deadline = time.monotonic() + PATIENCE_S
    while not link.send(ChunkRequest(policy_version=version, index=index)):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    received = link.receive(PATIENCE_S)
    assert received is not None
    assert isinstance(received.message, Chunk | ChunkGone)
    if isinstance(received.message, Chunk):
        chunk = torch.from_numpy(np.frombuffer(received.arrays[0], dtype=np.uint8).copy())
        assert torch.equal(chunk, FLAT[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
        assert received.message.checksum == checksum(chunk)
    return received.message


def test_impossible_requests_get_nothing_and_do_no_harm(server: WeightServer) -> None:
    with open_link(f"tcp://127.0.0.1:{server.port}") as link:
        for index, version in [(NUM_CHUNKS, VERSION), (0, VERSION + 1), (0, 0), (1 << 62, VERSION)]:
            assert ask(link, index, version) == ChunkGone(policy_version=version, index=index)
        link.send(Credit(capacity=1))
        assert isinstance(ask(link, NUM_CHUNKS - 1), Chunk)
    assert server.num_rejected == 1


def test_actor_that_asks_for_ever_is_served_no_more_than_a_few_times_the_version(server: WeightServer) -> None:
    with open_link(f"tcp://127.0.0.1:{server.port}") as link:
        for _ in range(MAX_SERVINGS * NUM_CHUNKS):
            assert isinstance(ask(link, 3), Chunk)
        assert isinstance(ask(link, 3), ChunkGone)


def test_chunk_whose_answer_was_lost_is_asked_for_again(
    server: WeightServer, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_pull, "FIRST_RETRY_S", 0.05)
    lost: list[int] = []
    send = server._hub.send

    def lose_two(peer: bytes, message: LearnerMessage, *arrays: Array) -> bool:
        if isinstance(message, Chunk) and message.index == 5 and len(lost) < 2:
            lost.append(message.index)
            return False
        return send(peer, message, *arrays)

    monkeypatch.setattr(server._hub, "send", lose_two)
    assert outcome_of(receiver, pull_from(server.port)).error == ""
    assert torch.equal(receiver.buffer.flat, FLAT)
    assert lost == [5, 5]
