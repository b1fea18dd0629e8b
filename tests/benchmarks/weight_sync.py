"""The cost of a weight update: in a quick-start run, against memcpy and a bare gloo broadcast, and as actors join or die.

    python -m tests.benchmarks.weight_sync run         # `offbeat train` on the quick start: stalls, waits, shares; 1 minute
    python -m tests.benchmarks.weight_sync transfer    # 256 MB to one and to two receivers; 20 seconds
    python -m tests.benchmarks.weight_sync pull        # the same to receivers that pull; 20 seconds
    python -m tests.benchmarks.weight_sync checksum    # 256 MB, against memcpy
    python -m tests.benchmarks.weight_sync commit      # replayed commits against vLLM's reload, quick start's model; 1 minute
    python -m tests.benchmarks.weight_sync join        # optimizer steps a second, also while 4 newcomers pull; 1 minute
    python -m tests.benchmarks.weight_sync death       # a member is killed, or stopped, during a broadcast; 1 minute

`transfer` and `pull` measure from the moment the weights are ready until the last receiver has confirmed them:

    memcpy      one thread of this process copies the bytes once for each receiver
    gloo        one `broadcast` of the whole buffer in an existing process group
    gloo 8 MB   broadcasts of the buffer in pieces of the publisher's size
    offbeat     WeightPublisher -> announcement -> checksum -> ready, go -> broadcast -> WeightReceiver -> checksum
                with `pull`: WeightPublisher -> announcement -> chunks that WeightReceiver asks for -> checksum
"""

import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from offbeat.common.processes.environment import prepare_environment
from offbeat.common.records.rows import ActorRow, CommitRow, StepRow, WeightsRow
from offbeat.common.weights.flat import checksum as checksum_of
from offbeat.common.weights.flat import tensor_dtype
from tests.benchmarks.measuring import (
    PATIENCE_S,
    OffbeatRun,
    actor_shares,
    learner_shares,
    print_table,
    processes,
    receive_from,
    run_offbeat,
    spread,
)
from tests.benchmarks.weight_members import death, join
from tests.benchmarks.weight_transfer import NUM_BYTES, NUM_ROUNDS, transfer
from tests.weights import buffer_of

# The quick start

RUN_STEPS = 100
RUN_TIMEOUT_S = 170.0


def run() -> None:
    """Run the quick start and print the costs of its weight updates."""
    of_run = run_offbeat(
        "deploy/local/quickstart/quickstart.toml",
        f"train.num_steps={RUN_STEPS}",
        timeout_s=RUN_TIMEOUT_S,
    )
    steps = of_run.of_kind(StepRow)
    print_table(
        f"Quick start, {RUN_STEPS} steps, a weight update after each: median (min–max)",
        ("milliseconds", ""),
        [
            ["step", _milliseconds([step.measured("time/step_s") for step in steps[1:]])],
            ["generation stalled for an update (commit)", _milliseconds([row.stall_s for row in of_run.of_kind(CommitRow)])],
            ["update, announced to received (publish)", _milliseconds([row.publish_s for row in of_run.of_kind(WeightsRow)])],
            [
                "learner copies its weights and scores the canary",
                _milliseconds([step.measured("time/snapshot_s") for step in steps]),
            ],
            ["learner waits for the update before", _milliseconds([step.measured("time/publish_wait_s") for step in steps])],
            ["an actor's sampling in a step (baseline)", _milliseconds(_generate_s_per_step(of_run))],
        ],
    )
    print(
        f"\nstall / sampling: {_stalled_s(of_run) / _generating_s(of_run):.2%}; of an actor's time: {_stall_share(of_run):.2%}"
    )
    print(f"whole command: {of_run.cost.wall_s:.0f} s, {of_run.cost.cpu_s:.0f} CPU seconds")
    learner = [["learner", name, f"{share:.1%}"] for name, share in learner_shares(of_run).items()]
    actors = [["actors", name, _percent(shares)] for name, shares in actor_shares(of_run).items()]
    print_table("Shares of time, first to last step; commit_weights has the canary in it", ("", "", "share"), learner + actors)


def _milliseconds(seconds: list[float]) -> str:
    return spread([1000 * value for value in seconds], 1)


def _percent(shares: list[float]) -> str:
    return " and ".join(f"{share:.1%}" for share in sorted(shares))


def _generating_s(of_run: OffbeatRun) -> float:
    """Return the sampling seconds of all actors over the whole run."""
    last_beats = {row.actor: row.seconds["generate"] for row in of_run.of_kind(ActorRow)}
    return sum(last_beats.values())


def _stalled_s(of_run: OffbeatRun) -> float:
    return sum(row.stall_s for row in of_run.of_kind(CommitRow))


def _stall_share(of_run: OffbeatRun) -> float:
    """Return the share of stalls in the time of all actors, between the first and the last step."""
    steps = of_run.of_kind(StepRow)
    first_time, last_time = steps[0].time, steps[-1].time
    stalled_s = sum(row.stall_s for row in of_run.of_kind(CommitRow) if first_time < row.time <= last_time)
    num_actors = len({row.actor for row in of_run.of_kind(ActorRow)})
    return stalled_s / (last_time - first_time) / num_actors


def _generate_s_per_step(of_run: OffbeatRun) -> list[float]:
    """Return each actor's sampling seconds per step, between the first and the last step."""
    steps = of_run.of_kind(StepRow)
    step_s = (steps[-1].time - steps[0].time) / (len(steps) - 1)
    return [share * step_s for share in actor_shares(of_run)["generate"]]


# The checksum


def checksum() -> None:
    """Measure the checksum against memcpy and CRC-32, and print the table."""
    torch.set_num_threads(1)
    flat = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8)
    copy = torch.zeros_like(flat)
    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: copy.copy_(flat),
        "offbeat.common.weights.flat.checksum": lambda: checksum_of(flat),
        "zlib.crc32": lambda: zlib.crc32(flat.numpy().data),
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(2 * NUM_ROUNDS):
        for way, run_once in ways.items():
            started = time.monotonic()
            run_once()
            speeds[way].append(NUM_BYTES / 1e9 / (time.monotonic() - started))
    rows = [[way, spread(speeds[way])] for way in ways]
    print_table(f"{NUM_BYTES >> 20} MB, one thread: median (min–max)", ("", "GB/s"), rows)


# The commit

NUM_COMMITS = 50
"""Commits of one way in a round."""


def commit() -> None:
    """Measure the CPU time of a commit, canary apart, as copies and by vLLM's generic reload."""
    rows: list[list[str]] = []
    for dtype in ("float32", "bfloat16"):
        with processes(measure_commits, 1, dtype) as (connection,):
            measured = receive_from(connection, 2 * PATIENCE_S)
        rows += [[dtype, way, spread(milliseconds, 1)] for way, milliseconds in measured.items()]
    title = f"CPU milliseconds of a commit, mean of {NUM_COMMITS}: median (min–max) of {NUM_ROUNDS} rounds"
    print_table(title, ("dtype", "way", "ms"), rows)


def measure_commits(connection: Connection, dtype: str) -> None:
    """Send the CPU milliseconds of each way to commit, by round."""
    from transformers import AutoModelForCausalLM

    from offbeat.actor.engines.choice import make_engine
    from offbeat.actor.engines.engine import EngineSettings
    from offbeat.deploy.local.quickstart.tiny_models import make_tiny_model
    from offbeat.protocols.message_parts import ModelHashes

    prepare_environment()
    with tempfile.TemporaryDirectory(prefix="offbeat-benchmark-") as folder:
        make_tiny_model(Path(folder), alphabet="0123456789abcdefghijklmnopqrstuvwxyz+-=>")
        engine = make_engine(
            "vllm", folder, EngineSettings(dtype=dtype, max_model_len=256, hashes=ModelHashes("", "", ""), seed=0, options={})
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=tensor_dtype(dtype))
    buffer = buffer_of(model.named_parameters())
    worker = cast(Any, engine)._engine.model_executor.driver_worker.worker
    engine.load_weights(buffer, 0, recompute_kv=True)
    replay = worker._replay
    assert replay is not None
    milliseconds: dict[str, list[float]] = {"vLLM's reload": [], "copies": []}
    for _ in range(NUM_ROUNDS):
        for way, values in milliseconds.items():
            worker._replay = replay if way == "copies" else None
            started = time.process_time()
            for version in range(NUM_COMMITS):
                engine.load_weights(buffer, version, recompute_kv=True)
            values.append(1000 * (time.process_time() - started) / NUM_COMMITS)
    connection.send(milliseconds)


def main() -> None:
    """Run the parts named on the command line, or all of them."""
    prepare_environment()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parts = {
        "run": run,
        "transfer": lambda: transfer("gloo"),
        "pull": lambda: transfer("pull"),
        "checksum": checksum,
        "commit": commit,
        "join": join,
        "death": death,
    }
    for part in sys.argv[1:] or parts:
        parts[part]()


if __name__ == "__main__":
    main()
