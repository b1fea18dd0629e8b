"""Trials of rollout transport: a learner's process that takes groups, and many light actors in this process."""

import gc
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zmq

from offbeat.common.records.rows import Recorder
from offbeat.common.settings.config import LogSection
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.hub import HubThread
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.channels import RECEIVE_QUEUE_MESSAGES, SEND_QUEUE_MESSAGES, Hub
from offbeat.protocols.keys import AllowList, HubKeys, KeyPair, make_key_pair, public_text
from offbeat.protocols.messages import Ack, Lease, Sampling, Welcome
from offbeat.protocols.wire import Frame, encode
from tests.benchmarks.measuring import receive_from
from tests.benchmarks.simulated_actors import PATIENCE_S, EncodedGroup, SimulatedActors
from tests.benchmarks.stand_ins import CANARY, MAX_LENGTH, make_dispatcher

GROUP_SIZE = 8
GROUPS_PER_STEP = 32
WINDOW = 64
MAX_MESSAGE_BYTES = 1 << 28
LOOPBACK = "tcp://127.0.0.1:0"
MEBI = 1 << 20


class Keys(NamedTuple):
    """Keys of all peers in a trial."""

    learner: KeyPair
    actors: KeyPair
    """The key that all actors share."""
    intruder: KeyPair
    """Another key that is allowed to be an actor."""
    allowed: Path
    """File with the allowed keys."""


class Trial(NamedTuple):
    """One measurement's configuration."""

    learner: str
    """`raw` or `hub`."""
    keys: Keys | None
    has_log: bool
    num_tokens: int
    num_actors: int
    num_groups: int

    @property
    def capacity(self) -> int:
        """Leases of one actor at a time."""
        return max(1, WINDOW // self.num_actors)

    @property
    def name(self) -> str:
        """The name of the variant in the tables."""
        return self.learner + ", keys" * (self.keys is not None) + ", log" * self.has_log


class TrialTimes(NamedTuple):
    """Times of a trial."""

    wall_s: float
    learner_cpu_s: float
    """CPU seconds of all threads of the learner's process."""
    actors_cpu_s: float
    ack_s: list[float]
    """Seconds from sending to acknowledgement, of every group."""


def make_keys(folder: Path) -> Keys:
    """Return new keys, and write their list."""
    learner, actors, intruder = (
        make_key_pair("learner", "main"),
        make_key_pair("actor", "actor-*"),
        make_key_pair("actor", "intruder"),
    )
    allowed = folder / "allowed"
    allowed.write_text(public_text(actors.owner) + public_text(intruder.owner))
    return Keys(learner, actors, intruder, allowed)


# The learner's process


def serve(connection: Connection) -> None:
    """Serve one trial after another. Send the address, this process's CPU seconds and `closed` for each."""
    serve_by_name = {"raw": serve_raw, "hub": serve_hub}
    while True:
        trial = connection.recv()
        serve_by_name[trial.learner](connection, trial)
        gc.collect()
        connection.send("closed")


def serve_raw(connection: Connection, trial: Trial) -> None:
    """Answer each group with an acknowledgement and a lease, recognizing it by its number of frames."""
    welcome, ack, lease = raw_answers()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 500)
        router.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        router.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
        if trial.keys is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_PUBLICKEY, trial.keys.learner.owner.public)
            router.setsockopt(zmq.CURVE_SECRETKEY, trial.keys.learner.secret)
        router.bind(LOOPBACK)
        connection.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
        num_small: Counter[bytes] = Counter()
        num_leased = num_answered = 0
        cpu_before = 0.0
        while num_answered < trial.num_groups:
            assert router.poll(round(PATIENCE_S * 1000)), "no actor sends anything"
            while frames := receive_raw(router):
                peer = frames[0].bytes
                num_leases = 1
                if len(frames) > 3:
                    router.send_multipart([peer, *ack], zmq.NOBLOCK)
                    num_answered += 1
                else:
                    # Actors send hello, the version of their weights and credit, always in this order.
                    num_small[peer] += 1
                    if num_small[peer] == 1:
                        router.send_multipart([peer, *welcome], zmq.NOBLOCK)
                    num_leases = trial.capacity if num_small[peer] == 3 else 0
                    if not num_leased:
                        cpu_before = time.process_time()
                for _ in range(min(num_leases, trial.num_groups - num_leased)):
                    router.send_multipart([peer, *lease], zmq.NOBLOCK)
                    num_leased += 1
        connection.send(time.process_time() - cpu_before)
        connection.recv()


def receive_raw(router: zmq.Socket) -> list[zmq.Frame]:
    """Return the next message's frames; empty when no message waits."""
    try:
        frames = [router.recv(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return []
    while frames[-1].more:
        frames.append(router.recv(zmq.NOBLOCK, copy=False))
    return frames


def raw_answers() -> tuple[list[Frame], list[Frame], list[Frame]]:
    """Return the frames of a welcome, an acknowledgement and a lease as large as the hub's."""
    welcome = Welcome(run_id="", learner_incarnation=0, max_message_bytes=0, layout=(), policy_version=0)
    lease = Lease(
        lease_id=1000,
        prompt_id=10,
        group_size=GROUP_SIZE,
        sampling=Sampling(max_new_tokens=MAX_LENGTH // 2),
        min_policy_version=0,
        timeout_s=600.0,
        prompt="",
        row="{}",
    )
    return encode(welcome, CANARY), encode(Ack(lease_id=1000, outcome="accepted")), encode(lease, CANARY)


def serve_hub(connection: Connection, trial: Trial) -> None:
    """Process rollouts like the learner, but without training."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="transport-benchmark-") as folder, open_hub(trial.keys) as hub:
        settings = LogSection()
        log = RolloutLog(
            Path(folder),
            run_id="run",
            fsync=settings.fsync,
            retain_bytes=settings.retain_mb * MEBI,
            min_free_bytes=settings.min_free_mb * MEBI,
        )
        num_steps = trial.num_groups // GROUPS_PER_STEP
        dispatcher = open_dispatcher(num_steps, log if trial.has_log else None)
        hub_thread = HubThread(hub, dispatcher)
        hub_thread.start()
        connection.send(hub.address)
        assert connection.recv() == "joined"
        cpu_before = time.process_time()
        for policy_version in range(1, num_steps + 1):
            groups = dispatcher.take_batch(PATIENCE_S)
            assert groups is not None, dispatcher.waiting_for()
            dispatcher.finish_batch(groups, policy_version)
            hub.wake()
        assert dispatcher.counts().trained == trial.num_groups
        connection.send(time.process_time() - cpu_before)
        connection.recv()
        hub_thread.close()
        log.close()


def open_hub(keys: Keys | None) -> Hub:
    """Return the learner's hub, encrypted if there are keys."""
    if keys is None:
        return Hub(LOOPBACK, max_message_bytes=MAX_MESSAGE_BYTES)
    return Hub(LOOPBACK, max_message_bytes=MAX_MESSAGE_BYTES, keys=HubKeys(keys.learner, AllowList(keys.allowed)))


def open_dispatcher(
    num_steps: int, log: RolloutLog | None, record: Recorder = lambda row: None, *, groups_per_step: int = GROUPS_PER_STEP
) -> Dispatcher:
    """Return a dispatcher whose actors have all the weights they need."""
    dispatcher = make_dispatcher(
        group_size=GROUP_SIZE,
        groups_per_step=groups_per_step,
        num_steps=num_steps,
        # Credit alone limits the leases.
        max_staleness=num_steps,
        target="bound",
        layout=(),
        log=log,
        record=record,
        on_join=lambda peer: None,
        on_weights=lambda actor, message: None,
    )
    dispatcher.publish(0)
    return dispatcher


# The actors' process


def measure(connection: Connection, trial: Trial, joined: Callable[[str], None] = lambda address: None) -> TrialTimes:
    """Run one trial; call `joined` with the hub's address once all actors are welcome, before the measurement."""
    group = EncodedGroup(GROUP_SIZE, trial.num_tokens)
    connection.send(trial)
    address = receive_from(connection)
    actors = connect_actors(address, trial.num_actors, trial.keys)
    try:
        actors.join()
        joined(address)
        if trial.learner == "hub":
            connection.send("joined")
        cpu_before = time.process_time()
        wall_s, ack_s = actors.answer(group, trial.num_groups, trial.capacity)
        actors_cpu_s = time.process_time() - cpu_before
        learner_cpu_s = receive_from(connection)
        connection.send("answered")
        # The learner has deleted its folder by then.
        assert receive_from(connection) == "closed"
        return TrialTimes(wall_s, learner_cpu_s, actors_cpu_s, ack_s)
    finally:
        actors.close()


def connect_actors(address: str, num_actors: int, keys: Keys | None) -> SimulatedActors:
    """Return actors that have not said hello yet."""
    if keys is None:
        return SimulatedActors(address, num_actors, key=None, learner_key=None)
    return SimulatedActors(address, num_actors, key=keys.actors, learner_key=keys.learner.owner)


def measure_copy(num_tokens: int, num_groups: int) -> TrialTimes:
    """Copy `num_groups` groups from frames to `WINDOW` buffers whose memory is allocated already."""
    frames = [np.frombuffer(frame, np.uint8) for frame in EncodedGroup(GROUP_SIZE, num_tokens).frames(1)]
    buffers = [[np.ones_like(frame) for frame in frames] for _ in range(WINDOW)]
    started = time.monotonic()
    cpu_before = time.process_time()
    for index in range(num_groups):
        for buffer, frame in zip(buffers[index % WINDOW], frames, strict=True):
            buffer[:] = frame
    return TrialTimes(time.monotonic() - started, time.process_time() - cpu_before, 0.0, [0.0])
