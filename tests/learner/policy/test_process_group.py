"""Two real processes meet, and gather each other's tensors."""

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from offbeat.deploy.local.launcher import free_port
from offbeat.learner.policy.process_group import gather_rows, join_process_group
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


def meet(rank: int, port: int, connection: Connection) -> None:
    """Join the other rank; send when the trial connections were made, a second late on rank 1, and when they were closed."""
    moments: list[float] = []
    connect = dist.ProcessGroupGloo

    class Trial:
        def __init__(self, *arguments: Any) -> None:
            self.group = connect(*arguments)
            time.sleep(rank)
            moments.append(time.monotonic())

        def __del__(self) -> None:
            moments.append(time.monotonic())

    variables = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        patch.setattr(dist, "ProcessGroupGloo", Trial)
        join_process_group()
    connection.send(moments)
    dist.destroy_process_group()


def test_no_rank_closes_its_trial_connections_before_all_have_made_theirs() -> None:
    connections, port = [], free_port("127.0.0.1")
    for rank in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=meet, args=(rank, port, theirs), daemon=True).start()
        connections.append(ours)
    assert all(connection.poll(PATIENCE_S) for connection in connections)
    (_, first_closed), (second_made, _) = (connection.recv() for connection in connections)
    assert first_closed > second_made
