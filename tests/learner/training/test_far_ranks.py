"""Files of ranks that do not see rank 0's folder, copied between two real processes."""

import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from offbeat.learner.training import trainer_state as far_ranks
from tests.forked import context

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
CONTENTS = {"empty": b"", "of_one_chunk": b"12345678", "longer": bytes(range(29))}


def run_rank(act: Callable[[], Any], rank: int, store: str, folder: Path, connection: Connection) -> None:
    os.chdir(folder)
    far_ranks.CHUNK_BYTES = 8
    dist.init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2)
    connection.send(act())
    dist.destroy_process_group()


def on_two_ranks(act: Callable[[], Any], tmp_path: Path, *folders: Path) -> list[Any]:
    """Return what each of two ranks returns, which work in these folders."""
    connections = []
    for rank, folder in enumerate(folders):
        ours, theirs = context.Pipe()
        arguments = (act, rank, str(tmp_path / "store"), folder, theirs)
        context.Process(target=run_rank, args=arguments, daemon=True).start()
        connections.append(ours)
    assert all(connection.poll(PATIENCE_S) for connection in connections)
    return [connection.recv() for connection in connections]


def copy_to_rank_0() -> tuple[OSError | None, str]:
    if dist.get_rank() == 0 and Path("is_full").exists():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    failure = far_ranks.copy_files(Path("files"), list(CONTENTS), source=1, target=0)
    return failure, Path.cwd().name


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    """Return the working folders of two ranks, the second of which has files."""
    folders = [tmp_path / name for name in ("machine-0", "machine-1")]
    for folder in folders:
        (folder / "files").mkdir(parents=True)
    for name, content in CONTENTS.items():
        (folders[1] / "files" / name).write_bytes(content)
    return folders


def test_files_arrive_as_they_were_whatever_their_length(tmp_path: Path, machines: list[Path]) -> None:
    assert on_two_ranks(copy_to_rank_0, tmp_path, *machines) == [(None, "machine-0"), (None, "machine-1")]
    assert {path.name: path.read_bytes() for path in (machines[0] / "files").iterdir()} == CONTENTS


def test_full_disk_of_the_receiver_is_its_failure_and_the_sender_gets_to_its_end(tmp_path: Path, machines: list[Path]) -> None:
    (machines[0] / "is_full").touch()
    (failure, _), sender = on_two_ranks(copy_to_rank_0, tmp_path, *machines)
    assert isinstance(failure, OSError)
    assert "File too large" in str(failure)
    assert sender == (None, "machine-1")


def find_far() -> list[int]:
    return far_ranks.find_far_ranks(Path("files"))


def test_folder_of_the_same_path_on_another_machine_is_another_folder(tmp_path: Path, machines: list[Path]) -> None:
    assert on_two_ranks(find_far, tmp_path, *machines) == [[1], [1]]


def test_folder_that_both_see_is_one(tmp_path: Path, machines: list[Path]) -> None:
    assert on_two_ranks(find_far, tmp_path, machines[0], machines[0]) == [[], []]


def test_folder_that_is_not_there_is_another_folder(tmp_path: Path, machines: list[Path]) -> None:
    (elsewhere := tmp_path / "machine-2").mkdir()
    assert on_two_ranks(find_far, tmp_path, machines[0], elsewhere) == [[1], [1]]
