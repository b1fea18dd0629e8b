"""The speed of rollouts from actors to the learner, compared with raw ZeroMQ moving the same frames.

    python -m tests.benchmarks.transport [sizes] [actors] [memory] [flood]    # 10 minutes; the log is in the current folder

This process runs all actors (`simulated_actors`), another process the learner:

    copy  copies every frame of a group once, and does nothing else
    raw   a ROUTER moves the same frames in both directions (groups; an acknowledgement and a lease for each) unread
    hub   the production Hub, HubThread, Dispatcher with every check, Ledger and gate; the training thread only takes batches

`keys`: with CURVE; `log`: with the rollout log at its default settings. All actors together may have `WINDOW` groups
unanswered, at least one each; so at full speed the time to an acknowledgement is that number divided by the throughput.

Metrics rows (a learner writes one per group), weights and training are left out.
"""

import contextlib
import functools
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import zmq

from offbeat.learner.hub import HubThread
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.wire import MAGIC
from tests.benchmarks.measuring import print_table, processes, receive_from, spread
from tests.benchmarks.simulated_actors import PATIENCE_S, EncodedGroup, make_hello, open_dealer, send
from tests.benchmarks.transport_trials import (
    GROUP_SIZE,
    GROUPS_PER_STEP,
    MEBI,
    Keys,
    Trial,
    TrialTimes,
    connect_actors,
    make_keys,
    measure,
    measure_copy,
    open_dispatcher,
    open_hub,
    serve,
)

NUM_ROUNDS = 5
NUM_GROUPS = {64: 6400, 1024: 3200, 4096: 1280}
"""Number of groups in one trial, by tokens per completion."""
NUM_ACTORS = (1, 8, 64, 512)


def throughput(keys: Keys, title: str, trials: list[Trial]) -> None:
    """Measure each trial in every round, copies included, and print the table."""
    outcomes: dict[Trial | int, list[TrialTimes]] = {}
    with processes(serve, 1) as (connection,):
        for _ in range(NUM_ROUNDS):
            for trial in trials:
                outcomes.setdefault(trial, []).append(measure(connection, trial))
            for num_tokens in sorted({trial.num_tokens for trial in trials}):
                outcomes.setdefault(num_tokens, []).append(measure_copy(num_tokens, NUM_GROUPS[num_tokens]))
    rows = []
    for num_tokens, num_actors in sorted({(trial.num_tokens, trial.num_actors) for trial in trials}):
        of_raw = outcomes[Trial("raw", None, False, num_tokens, num_actors, NUM_GROUPS[num_tokens])]
        rows.append(throughput_row("copy", num_tokens, 0, NUM_GROUPS[num_tokens], outcomes[num_tokens], of_raw))
        for trial in trials:
            if (trial.num_tokens, trial.num_actors) == (num_tokens, num_actors):
                rows.append(throughput_row(trial.name, num_tokens, num_actors, trial.num_groups, outcomes[trial], of_raw))
    print_table(
        f"{title}: groups of {GROUP_SIZE}, {NUM_ROUNDS} interleaved rounds: median (min–max)",
        (
            *("tokens", "actors", "variant", "groups/s", "MB/s", "p99 ack ms", "learner CPU µs/group", "actors' CPU"),
            "speed / raw",
        ),
        rows,
    )


def throughput_row(
    name: str, num_tokens: int, num_actors: int, num_groups: int, outcomes: list[TrialTimes], of_raw: list[TrialTimes]
) -> list[str]:
    """Return one line of the table; the last figure compares with the raw trial of the same round."""
    num_bytes = EncodedGroup(GROUP_SIZE, num_tokens).num_bytes
    rates = [num_groups / outcome.wall_s for outcome in outcomes]
    pairs = zip(outcomes, of_raw, strict=True)
    return [
        f"{GROUP_SIZE} x {num_tokens}",
        str(num_actors or ""),
        name,
        spread(rates, 0),
        spread([rate * num_bytes / 1e6 for rate in rates], 0),
        spread([float(np.percentile(outcome.ack_s, 99)) * 1e3 for outcome in outcomes], 1) if num_actors else "",
        spread([outcome.learner_cpu_s / num_groups * 1e6 for outcome in outcomes], 0),
        spread([outcome.actors_cpu_s / num_groups * 1e6 for outcome in outcomes], 0) if num_actors else "",
        spread([raw.wall_s / outcome.wall_s for outcome, raw in pairs]),
    ]


def sizes(keys: Keys) -> None:
    """Measure all variants by the size of the groups."""
    trials = [
        Trial(learner, has_keys, has_log, num_tokens, 8, num_groups)
        for num_tokens, num_groups in NUM_GROUPS.items()
        for learner, has_log in (("raw", False), ("hub", False), ("hub", True))
        for has_keys in (None, keys)
    ]
    throughput(keys, "Rollout transport by size", trials)


def actors(keys: Keys) -> None:
    """Measure the whole hub by the number of actors."""
    trials = [
        Trial(learner, has_keys, has_log, 1024, num_actors, NUM_GROUPS[1024])
        for num_actors in NUM_ACTORS
        for learner, has_keys, has_log in (("raw", None, False), ("hub", None, True), ("hub", keys, True))
    ]
    throughput(keys, "Rollout transport by number of actors", trials)


# Memory


def memory(keys: Keys) -> None:
    """Measure the learner's memory per connected actor, each figure in a separate process."""
    rows = []
    for of_all in (None, keys):
        for num_actors in (64, 512):
            trial = Trial("hub", of_all, True, 1024, num_actors, 32 * num_actors)
            connected, answered = zip(*(measure_memory(trial) for _ in range(3)), strict=True)
            rows.append(
                [
                    trial.name,
                    str(num_actors),
                    *(spread([size / num_actors / 1024 for size in of]) for of in (connected, answered)),
                ]
            )
    print_table(
        f"KiB of the learner's resident memory per actor, 3 processes each: median (min–max); groups of {GROUP_SIZE} x 1024",
        ("variant", "actors", "welcome, idle", "after 32 groups each"),
        rows,
    )


def measure_memory(trial: Trial) -> tuple[int, int]:
    """Return the learner's growth in bytes once all actors are welcome, and once all groups are trained on."""
    with processes(serve_memory, 1) as (connection,):
        connection.send(trial)
        actors = connect_actors(receive_from(connection), trial.num_actors, trial.keys)
        try:
            actors.join()
            connection.send("joined")
            connected = receive_from(connection)
            actors.answer(EncodedGroup(GROUP_SIZE, trial.num_tokens), trial.num_groups, trial.capacity)
            answered = receive_from(connection)
            connection.send("answered")
            assert receive_from(connection) == "closed"
            return connected, answered
        finally:
            actors.close()


def serve_memory(connection: Connection) -> None:
    """Serve one trial; send the growth of resident memory after the actors join and after the last batch."""
    trial: Trial = connection.recv()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="transport-benchmark-") as folder, open_hub(trial.keys) as hub:
        log = RolloutLog(
            Path(folder), run_id="run", fsync="off", segment_bytes=64 * MEBI, retain_bytes=1 << 40, min_free_bytes=MEBI
        )
        dispatcher = open_dispatcher(trial.num_groups // GROUPS_PER_STEP, log)
        hub_thread = HubThread(hub, dispatcher)
        hub_thread.start()
        before = resident_bytes()
        connection.send(hub.address)
        assert connection.recv() == "joined"
        connection.send(resident_bytes() - before)
        for policy_version in range(1, trial.num_groups // GROUPS_PER_STEP + 1):
            groups = dispatcher.take_batch(PATIENCE_S)
            assert groups is not None, dispatcher.waiting_for()
            dispatcher.finish_batch(groups, policy_version)
            hub.wake()
        connection.send(resident_bytes() - before)
        connection.recv()
        hub_thread.close()
        log.close()
    connection.send("closed")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# A flood


def flood(keys: Keys) -> None:
    """Measure an honest actor while the holder of another key sends as much as it can."""
    trial = Trial("hub", keys, True, 1024, 1, NUM_GROUPS[1024])
    outcomes: dict[str, list[TrialTimes]] = {}
    with processes(serve, 1) as (learner,), processes(intrude, 1) as (intruder,):
        for _ in range(NUM_ROUNDS):
            for deed in DEEDS:
                outcomes.setdefault(deed, []).append(measure(learner, trial, functools.partial(set_to, intruder, deed, keys)))
                if deed != "nothing":
                    intruder.send("end")
                    assert receive_from(intruder) == "ended"
    rows = [
        [
            deed,
            spread([trial.num_groups / outcome.wall_s for outcome in of_deed], 0),
            spread([float(np.percentile(outcome.ack_s, 99)) * 1e3 for outcome in of_deed], 1),
            spread([alone.wall_s / outcome.wall_s for outcome, alone in zip(of_deed, outcomes["nothing"], strict=True)]),
        ]
        for deed, of_deed in outcomes.items()
    ]
    print_table(
        f"One honest actor, groups of {GROUP_SIZE} x 1024, keys, log; another process does something, {NUM_ROUNDS} interleaved "
        "rounds: median (min–max)",
        ("the other process", "groups/s", "p99 ack ms", "speed / alone"),
        rows,
    )


def set_to(intruder: Connection, deed: str, keys: Keys, address: str) -> None:
    """Make the intruder start a deed."""
    if deed != "nothing":
        intruder.send((deed, keys, address))
        assert receive_from(intruder) == "begun"


DEEDS = ("nothing", "computes", "sends what is no message", "sends groups for the leases of others")


def intrude(connection: Connection) -> None:
    """Carry out each deed that arrives until the next message."""
    foreign, magic = EncodedGroup(GROUP_SIZE, 1024), bytes(MAGIC)
    while True:
        deed, keys, address = connection.recv()
        with zmq.Context() as context:
            socket = open_dealer(context, address, "intruder", key=keys.intruder, learner_key=keys.learner.owner)
            socket.setsockopt(zmq.LINGER, 0)
            send(socket, make_hello("intruder"))
            socket.recv_multipart()
            connection.send("begun")
            lease_id = 0
            while not connection.poll():
                for _ in range(100):
                    lease_id += 1
                    if deed == "computes":
                        foreign.frames(lease_id)
                    else:
                        frames = [magic, os.urandom(8192)] if deed == "sends what is no message" else foreign.frames(lease_id)
                        # Do not wait for a full queue, so that the end is noticed.
                        with contextlib.suppress(zmq.Again):
                            socket.send_multipart(frames, zmq.NOBLOCK)
            connection.recv()
            socket.close()
        connection.send("ended")


def main() -> None:
    """Run the parts named on the command line, or all of them."""
    parts = {"sizes": sizes, "actors": actors, "memory": memory, "flood": flood}
    with tempfile.TemporaryDirectory(prefix="transport-benchmark-") as folder:
        keys = make_keys(Path(folder))
        for part in sys.argv[1:] or parts:
            parts[part](keys)


if __name__ == "__main__":
    main()
