"""The cost of the rollout log, compared with writing and copying the same bytes in the same run.

    python -m tests.benchmarks.rollout_log [FOLDER]    # 1 minute; FOLDER: on the disk to measure, default the current one

One process appends groups of 8 completions, and reads them again:

    copy      only copies the same bytes into another buffer
    os.write  only writes the same bytes as one block into another file
    off, second, ack  append and commit, by fsync policy; one commit for each group
    ack/16    fsync policy ack with one commit for 16 groups, as in a learner that finds several groups waiting
    replay    read_log: map, check and decode each record; return its arrays

Segments have the default size; files are in the page cache when they are read.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from offbeat.learner.leases.events import Accepted
from offbeat.learner.leases.log_reading import encode_record, read_log
from offbeat.learner.leases.rollout_log import Fsync, RolloutLog
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.benchmarks.measuring import print_table, spread

NUM_ROUNDS = 5
GROUP_SIZE = 8
NUM_GROUPS = {64: 8000, 1024: 2000, 4096: 600}
"""Number of groups in one trial, by tokens per completion."""
NUM_SYNCED_GROUPS = 200
"""Number of groups in a trial with fsync policy ack."""
HUGE = 1 << 50

Payload = tuple[Accepted, np.ndarray, np.ndarray]


def make_payload(num_tokens: int) -> Payload:
    """Return a group whose completions have `num_tokens` tokens each."""
    generator = np.random.default_rng(num_tokens)
    completions = tuple(CompletionMeta(num_tokens, "stop", 1.0, (Segment(0, 0),)) for _ in range(GROUP_SIZE))
    event = Accepted(
        at=0.0,
        lease_id=1,
        actor="actor-0",
        completions=completions,
        generate_s=1.0,
        policy_version=0,
        prompt_hash=0,
        reward_s=0.0,
    )
    num_all = GROUP_SIZE * num_tokens
    return event, generator.integers(0, 150_000, num_all, np.int32), -generator.random(num_all, np.float32)


def copy(folder: Path, payload: Payload, num_groups: int) -> float:
    """Copy the bytes of all groups; return the seconds."""
    block = b"".join(encode_record(0, *payload))
    target = memoryview(bytearray(len(block) * num_groups))
    # Touch every page first: a page cache in use has its pages already.
    target[:] = bytes(len(target))
    started = time.perf_counter()
    for index in range(num_groups):
        target[index * len(block) : (index + 1) * len(block)] = block
    return time.perf_counter() - started


def plain_write(folder: Path, payload: Payload, num_groups: int) -> float:
    """Write the bytes of all groups to a file; return the seconds."""
    block = b"".join(encode_record(0, *payload))
    with (folder / "plain").open("wb", buffering=0) as file:
        started = time.perf_counter()
        for _ in range(num_groups):
            file.write(block)
        return time.perf_counter() - started


def append(folder: Path, payload: Payload, num_groups: int, *, fsync: Fsync, groups_per_commit: int = 1) -> float:
    """Append and commit all groups; return the seconds."""
    log = RolloutLog(folder, run_id="run", fsync=fsync, retain_bytes=HUGE, min_free_bytes=0)
    started = time.perf_counter()
    for index in range(num_groups):
        log.append(*payload)
        if index % groups_per_commit == groups_per_commit - 1:
            log.commit()
    took_s = time.perf_counter() - started
    log.close()
    return took_s


def replay(folder: Path, payload: Payload, num_groups: int) -> float:
    """Read all groups from a log; return the seconds, without those of writing."""
    append(folder, payload, num_groups, fsync="off")
    started = time.perf_counter()
    num_read = sum(len(record.arrays) == 2 for record in read_log(folder))
    assert num_read == num_groups
    return time.perf_counter() - started


VARIANTS: dict[str, Callable[[Path, Payload, int], float]] = {
    "copy": copy,
    "os.write": plain_write,
    "off": partial(append, fsync="off"),
    "second": partial(append, fsync="second"),
    "ack": partial(append, fsync="ack"),
    "ack/16": partial(append, fsync="ack", groups_per_commit=16),
    "replay": replay,
}


def main() -> None:
    """Measure all variants and print the table."""
    parent = Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd()
    rows = []
    for num_tokens, num_groups in NUM_GROUPS.items():
        payload = make_payload(num_tokens)
        num_bytes = sum(map(len, encode_record(0, *payload)))
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(NUM_ROUNDS):
            for variant, measure in VARIANTS.items():
                num_measured = NUM_SYNCED_GROUPS if variant.startswith("ack") else num_groups
                with tempfile.TemporaryDirectory(dir=parent, prefix="rollout-log-benchmark-") as folder:
                    seconds[variant].append(measure(Path(folder), payload, num_measured) / num_measured)
        rows += [table_row(variant, num_tokens, num_bytes, seconds) for variant in VARIANTS]
    print_table(
        f"Rollout log, groups of {GROUP_SIZE}, {NUM_ROUNDS} interleaved rounds: median (min–max)",
        ("tokens", "variant", "µs/group", "groups/s", "MB/s", "time / os.write"),
        rows,
    )


def table_row(variant: str, num_tokens: int, num_bytes: int, seconds: dict[str, list[float]]) -> list[str]:
    """Return one line of the table: rates, and the ratio to the plain write of the same round."""
    pairs = zip(seconds[variant], seconds["os.write"], strict=True)
    return [
        f"{GROUP_SIZE} x {num_tokens}",
        variant,
        spread([took_s * 1e6 for took_s in seconds[variant]], 1),
        spread([1 / took_s for took_s in seconds[variant]], 0),
        spread([num_bytes / took_s / 1e6 for took_s in seconds[variant]], 0),
        spread([took_s / plain_s for took_s, plain_s in pairs]),
    ]


if __name__ == "__main__":
    main()
