"""Tools for tests of the sockets: waiting, a peer that speaks ZMTP byte by byte, a recording proxy."""

import contextlib
import itertools
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import zmq

from offbeat.protocols.channels import Hub, Link, Received
from offbeat.protocols.keys import KeyPair, PublicKey
from offbeat.protocols.messages import Credit
from offbeat.protocols.wire import MAGIC, encode

ANY_PORT = "tcp://127.0.0.1:0"
LIMIT = 1 << 20
PATIENCE_S = 10.0
INTRODUCTION = Credit(capacity=100_000)

T = TypeVar("T")


def eventually(attempt: Callable[[], T | None]) -> T:
    """Return the first result that is neither None nor False; fail after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        result = attempt()
        if result is not None and result is not False:
            return result
        time.sleep(0.005)
    raise AssertionError(f"nothing within {PATIENCE_S} s")


def receive(hub: Hub) -> Received:
    """Return the next message that is no left-over of `introduce`."""

    def attempt() -> Received | None:
        hub.wait(0.05)
        received = hub.receive()
        return None if received is not None and received.packet == (INTRODUCTION, ()) else received

    return eventually(attempt)


def introduce(hub: Hub, link: Link) -> Received:
    """Let the hub hear the link: a ROUTER can send only to peers that it has heard."""

    def attempt() -> Received | None:
        # Repeated, because a message sent into a connection that just broke is lost.
        link.send(INTRODUCTION)
        hub.wait(0.1)
        return hub.receive()

    received = eventually(attempt)
    assert received.packet == (INTRODUCTION, ())
    return received


def port_of(hub: Hub) -> int:
    return int(hub.address.rpartition(":")[2])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class RawPeer:
    """A DEALER without keys, made of a TCP socket: it can send bytes that the library would not."""

    def __init__(self, port: int, identity: bytes) -> None:
        self._stream = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._stream.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", identity)
        self._stream.sendall(bytes([4, len(ready)]) + ready)
        self._read(64)
        assert self._read_frame()[1].startswith(b"\x05READY")

    def send(self, *frames: bytes) -> None:
        """Send one message."""
        self.send_bytes(as_zmtp(frames))

    def send_bytes(self, data: bytes) -> None:
        """Send any bytes."""
        self._stream.sendall(data)

    def receive(self) -> list[bytes]:
        """Return the frames of the next message."""
        frames: list[bytes] = []
        more = True
        while more:
            flags, frame = self._read_frame()
            frames.append(frame)
            more = bool(flags & 1)
        return frames

    def is_cut_off(self) -> bool:
        """Wait for the other end to close the connection; return False when it sends something instead."""
        with contextlib.suppress(ConnectionResetError):
            return not self._stream.recv(1)
        return True

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_frame(self) -> tuple[int, bytes]:
        flags = self._read(1)[0]
        (size,) = struct.unpack(">Q", self._read(8)) if flags & 2 else self._read(1)
        return flags, self._read(size)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._stream.recv(size - len(data))
            assert part, "the connection was closed"
            data += part
        return data


def as_zmtp(frames: Sequence[bytes]) -> bytes:
    """Return the bytes of a message on a TCP connection without keys."""
    last = len(frames) - 1
    return b"".join(bytes([2 | (index < last)]) + struct.pack(">Q", len(frame)) + frame for index, frame in enumerate(frames))


def replay(port: int, recorded: bytes) -> bytes:
    """Send recorded bytes to a hub again, at the pace of a real peer, and return the hub's answers."""
    greeting, rest = recorded[:64], recorded[64:]
    parts = [greeting]
    while rest:
        size = 9 + int.from_bytes(rest[1:9]) if rest[0] & 2 else 2 + rest[1]
        parts.append(rest[:size])
        rest = rest[size:]
    answers = b""
    with socket.create_connection(("127.0.0.1", port), timeout=0.2) as stream, contextlib.suppress(OSError):
        for part in parts:
            stream.sendall(part)
            # Handshakes are answered, messages are not.
            with contextlib.suppress(TimeoutError):
                answers += stream.recv(65536)
    return answers


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def rubbish(seed: int) -> Iterator[list[bytes]]:
    """Yield malformed messages without end."""
    random_ = random.Random(seed)
    kinds: list[list[bytes]] = [
        [b"rubbish"],
        [b""] * 500,
        [MAGIC, random_.randbytes(500)],
        [MAGIC, bytes(encode(Credit(capacity=1))[1])[:-1]],
        [b"x" * (LIMIT // 4)] * 2,
    ]
    while True:
        yield random_.choice(kinds)


def flood(port: int) -> None:
    """Send rubbish as fast as possible until the process is killed."""
    with RawPeer(port, b"flood") as raw:
        for frames in rubbish(0):
            raw.send(*frames)


def flood_with_key(address: str, key: KeyPair, learner_key: PublicKey) -> None:
    """Send rubbish under a key that is allowed, on one connection after another, until the process is killed."""
    with zmq.Context() as context:
        for number in itertools.count():
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.IDENTITY, b"flood-%d" % number)
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.setsockopt(zmq.CURVE_SERVERKEY, learner_key.public)
                dealer.setsockopt(zmq.CURVE_PUBLICKEY, key.owner.public)
                dealer.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
                dealer.setsockopt(zmq.IMMEDIATE, 1)
                dealer.connect(address)
                for frames in itertools.islice(rubbish(number), 200):
                    if dealer.poll(1000, zmq.POLLOUT):
                        dealer.send_multipart(frames)


class Tap:
    """A proxy between one link and its hub that records what the link sends."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.from_link = b""
        self._streams: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        # Closing alone does not end an accept or a recv that waits.
        for stream in (self._server, *self._streams):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            inner, _ = self._server.accept()
            outer = socket.create_connection(("127.0.0.1", self._port))
            self._streams += [inner, outer]
            backward = threading.Thread(target=self._pump, args=(outer, inner))
            self._threads.append(backward)
            backward.start()
            self._pump(inner, outer)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if target is self._streams[1]:
                    self.from_link += data
                target.sendall(data)


@contextlib.contextmanager
def tapped(hub: Hub) -> Iterator[Tap]:
    """Yield a tap on the hub's port."""
    tap = Tap(port_of(hub))
    try:
        yield tap
    finally:
        tap.close()
