"""The hub's work on one group, stage by stage and without sockets: where the learner's Python goes.

    python -m tests.benchmarks.hub_stages    # 10 s; the log is in the current folder

Actors answer every lease at once, in rounds of `GROUPS_PER_STEP` groups between two ticks. Each stage is measured in CPU time
of its thread, and of all rounds the 20th percentile counts: other work on the machine only adds to it.

    decode   frames to a message, with all checks of the wire
    take     the group's checks, ledger, log
    tick     new leases, in ledger and log; looks for silence and late leases
    encode   acknowledgement and lease to frames
    train    selection of the batch, its end, its rows
"""

import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.messages import Credit, Lease, WeightsCommitted
from offbeat.protocols.wire import decode_from_actor, encode
from tests.benchmarks.measuring import print_table
from tests.benchmarks.simulated_actors import EncodedGroup, make_hello
from tests.benchmarks.transport_trials import GROUP_SIZE, GROUPS_PER_STEP, MEBI, WINDOW, open_dispatcher

NUM_ROUNDS = 60
STAGES = ("decode", "take", "tick", "encode", "train")
TRIALS = ((64, 8, False), (64, 8, True), (1024, 8, True), (4096, 8, True), (64, 1000, True))
"""Tokens of a completion, actors, and whether there is a log."""


def measure(num_tokens: int, num_actors: int, log: RolloutLog | None) -> dict[str, float]:
    """Return the microseconds of each stage per group."""
    # Twice the rounds: there are leases for all actors to the end.
    dispatcher = open_dispatcher(2 * NUM_ROUNDS, log)
    group = EncodedGroup(GROUP_SIZE, num_tokens)
    for index in range(num_actors):
        name = f"actor-{index}"
        credit = Credit(capacity=max(1, 2 * WINDOW // num_actors))
        for message in (make_hello(name), WeightsCommitted(policy_version=0, stall_s=0.0), credit):
            dispatcher.handle(name.encode(), message, (), time.monotonic())
    spent: defaultdict[str, list[float]] = defaultdict(list)
    leases: list[tuple[bytes, int]] = []
    for policy_version in range(1, NUM_ROUNDS + 1):
        times = [time.thread_time()]
        dispatcher.tick(time.monotonic())
        times.append(time.thread_time())
        outgoing = dispatcher.take_outgoing()
        for one in outgoing:
            encode(one.message, *one.arrays)
        times.append(time.thread_time())
        leases += [(one.peer, one.message.lease_id) for one in outgoing if isinstance(one.message, Lease)]
        answered, leases = leases[:GROUPS_PER_STEP], leases[GROUPS_PER_STEP:]
        arrived = [(peer, [memoryview(frame) for frame in group.frames(lease_id)]) for peer, lease_id in answered]
        times.append(time.thread_time())
        packets = [(peer, decode_from_actor(frames)) for peer, frames in arrived]
        times.append(time.thread_time())
        for peer, packet in packets:
            dispatcher.handle(peer, *packet, now=time.monotonic())
        times.append(time.thread_time())
        batch = dispatcher.take_batch(0.0)
        assert batch is not None, dispatcher.waiting_for()
        dispatcher.finish_batch(batch, policy_version)
        times.append(time.thread_time())
        tick_s, encode_s, _, decode_s, take_s, train_s = np.diff(times)
        for stage, seconds in zip(STAGES, (decode_s, take_s, tick_s, encode_s, train_s), strict=True):
            spent[stage].append(seconds / GROUPS_PER_STEP * 1e6)
    # The first rounds grant many leases.
    return {stage: float(np.quantile(of_stage[3:], 0.2)) for stage, of_stage in spent.items()}


def main() -> None:
    """Measure every trial and print the table."""
    rows = []
    for num_tokens, num_actors, has_log in TRIALS:
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="hub-stages-benchmark-") as folder:
            log = RolloutLog(
                Path(folder), run_id="run", fsync="off", segment_bytes=64 * MEBI, retain_bytes=1 << 40, min_free_bytes=MEBI
            )
            spent = measure(num_tokens, num_actors, log if has_log else None)
            log.close()
        of_stages = [f"{spent[stage]:.1f}" for stage in STAGES]
        name = f"{GROUP_SIZE} x {num_tokens}"
        rows.append([name, str(num_actors), "yes" if has_log else "no", *of_stages, f"{sum(spent.values()):.0f}"])
    print_table("CPU time of the hub's stages, µs per group", ("tokens", "actors", "log", *STAGES, "all"), rows)


if __name__ == "__main__":
    main()
