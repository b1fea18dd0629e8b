"""Gathering tensors between two real processes."""

from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from offbeat.learner.policy.process_group import gather_rows
from tests.forked import context

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0


def run_rank(rank: int, store: str, num_rows: list[int], connection: Connection) -> None:
    """Gather rows that hold their rank and their number in it."""
    dist.init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2)
    rows = torch.tensor([[rank, row, -1.5] for row in range(num_rows[rank])], dtype=torch.float64).reshape(-1, 3)
    connection.send(gather_rows(rows).tolist())
    dist.destroy_process_group()


@pytest.mark.parametrize("num_rows", [[3, 1], [0, 2]], ids=str)
def test_rows_of_all_ranks_come_in_order_and_without_padding(num_rows: list[int], tmp_path: Path) -> None:
    connections = []
    for rank in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=run_rank, args=(rank, str(tmp_path / "store"), num_rows, theirs), daemon=True).start()
        connections.append(ours)
    expected = [[rank, row, -1.5] for rank in range(2) for row in range(num_rows[rank])]
    for connection in connections:
        assert connection.poll(PATIENCE_S)
        assert connection.recv() == expected
