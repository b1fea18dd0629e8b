"""The time of a snapshot of the learner's weights by two ranks, compared with rank 0 copying whole weights.

    python -m tests.benchmarks.snapshot_ranks [ROUNDS]    # 5 rounds: 2 GiB of memory, a minute

A Qwen3 model of 105 million parameters in bfloat16 on two ranks of this machine, gloo between them, for each ZeRO stage:

    rank 0      every weight is gathered where ranks hold parts of it, and rank 0 copies it
    each part   both ranks write what they hold into memory that they share

The ways take turns within a round. Training waits for a snapshot, so the time is that until both ranks have finished.
"""

import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.common.processes.environment import prepare_environment
from tests.benchmarks.measuring import print_table, processes, spread

NUM_ROUNDS = 5
STAGES = (0, 2, 3)
MODEL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


class Times(NamedTuple):
    """Seconds of the snapshots of one stage, a number for each round."""

    by_rank_0: list[float]
    by_parts: list[float]


def measure(connection: Connection) -> None:
    """Run one rank: receive its number, the folder of the model, the stage and the number of rounds; rank 0 sends `Times`."""
    rank, folder, stage, num_rounds = connection.recv()
    prepare_environment()
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from offbeat.common.settings.completion import complete
    from offbeat.common.settings.config import Config, DataSection, ModelSection
    from offbeat.common.settings.learning_sections import TrainSection
    from offbeat.common.weights.flat import WeightBuffer, buffer_bytes, map_bytes, named_views
    from offbeat.learner.policy.lora import merged_parameters
    from offbeat.learner.training.trainer import Trainer

    dist.init_process_group("gloo", store=FileStore(f"{folder}/store-{stage}", 2), rank=rank, world_size=2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "-", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    train = TrainSection(zero_stage=stage, groups_per_step=2)
    model = ModelSection(path=f"{folder}/model", dtype="bfloat16")
    trainer = Trainer(complete(Config(model=model, data=DataSection(train_data=""), train=train)))
    layout = trainer.layout()
    own = WeightBuffer(layout)
    # On the other rank it is of no use.
    buffer = WeightBuffer(layout)
    where = [buffer.address]
    dist.broadcast_object_list(where)
    flat = map_bytes(where[0], buffer_bytes(layout))
    shared = dict(named_views(flat, layout))
    # The first snapshot makes pages and connections.
    times = Times([], [])
    for is_counted in [False] + [True] * num_rounds:
        dist.barrier()
        started = time.perf_counter()
        for (_, view), (_, weight) in zip(own.views(), merged_parameters(trainer.networks.module.policy), strict=True):
            if rank == 0:
                view.copy_(weight)
        dist.barrier()
        halfway = time.perf_counter()
        trainer.snapshot(shared)
        if is_counted:
            times.by_rank_0.append(halfway - started)
            times.by_parts.append(time.perf_counter() - halfway)
    if rank == 0:
        assert torch.equal(own.flat, flat), "the ways must not differ"
    connection.send(times)


def main() -> None:
    """Measure and print."""
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_ROUNDS
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(Qwen3Config(**MODEL)).bfloat16().save_pretrained(Path(folder) / "model")
        for stage in STAGES:
            with processes(measure, 2) as connections:
                for rank, connection in enumerate(connections):
                    connection.send((rank, folder, stage, num_rounds))
                times: Times = connections[0].recv()
            ratios = [slow / fast for slow, fast in zip(times.by_rank_0, times.by_parts, strict=True)]
            rows.append([str(stage), *(spread([1e3 * value for value in part], 0) for part in times), spread(ratios, 1)])
    print_table(
        "WeightSnapshot of 0.2 GB of weights by two ranks",
        ("ZeRO stage", "rank 0, ms", "each part, ms", "rank 0 / each part"),
        rows,
    )


if __name__ == "__main__":
    main()
