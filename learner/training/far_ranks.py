"""Checkpoint files of ranks on machines that do not see the run's folder: they go to rank 0, and come back at a resume.

A rank that sees rank 0's folder reads and writes there. Any other one is a far rank: it has a temporary folder on its own
machine, and its files travel through the process group. So a learner on several machines needs no shared file system.
"""

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from offbeat.learner.policy.process_group import gather_tensors

CHUNK_BYTES = 64 << 20


class _Listed(msgspec.Struct, frozen=True):
    """A file that is about to be sent."""

    name: str
    """Its path in the folder."""
    num_bytes: int


def find_far_ranks(folder: Path) -> list[int]:
    """Return the ranks to whom the path `folder` is not the folder that it is to rank 0; a collective."""
    marks = gather_tensors(torch.tensor(_mark(folder)))
    return [rank for rank, mark in enumerate(marks) if not torch.equal(mark, marks[0])]


@contextlib.contextmanager
def own_place(folder: Path, far: Sequence[int]) -> Iterator[Path]:
    """Yield the folder that this rank reads and writes: rank 0's, or a far rank's temporary one (`TMPDIR`), not yet made."""
    if dist.get_rank() not in far:
        yield folder
        return
    temporary = Path(tempfile.gettempdir()) / f"offbeat-checkpoint-{uuid.uuid4().hex}"
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_files(folder: Path, names: Sequence[str], *, source: int, target: int) -> OSError | None:
    """Copy files from one rank's `folder` to another's; these two call, and `names` counts on the source only.

    Returns the error of this rank's disk. Both ranks get to the end all the same, so that none waits for the other.
    """
    if dist.get_rank() == source:
        return _send(folder, names, target)
    return _receive(folder, source)


def _send(folder: Path, names: Sequence[str], target: int) -> OSError | None:
    listed = [_Listed(name, (folder / name).stat().st_size) for name in names]
    header = torch.frombuffer(bytearray(msgspec.msgpack.encode(listed)), dtype=torch.uint8)
    dist.send(torch.tensor([len(header)]), target)
    dist.send(header, target)
    failure: OSError | None = None
    for file in listed:
        with (folder / file.name).open("rb") as stream:
            for num_bytes in _chunks(file.num_bytes):
                chunk = torch.empty(num_bytes, dtype=torch.uint8)
                try:
                    stream.readinto(chunk.numpy().data)
                except OSError as error:
                    failure = failure or error
                dist.send(chunk, target)
    return failure


def _receive(folder: Path, source: int) -> OSError | None:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    header = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(header, source)
    failure: OSError | None = None
    for file in msgspec.msgpack.decode(header.numpy().tobytes(), type=list[_Listed]):
        path = folder / file.name
        for index, num_bytes in enumerate(_chunks(file.num_bytes)):
            chunk = torch.empty(num_bytes, dtype=torch.uint8)
            dist.recv(chunk, source)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab" if index else "wb") as stream:
                    stream.write(chunk.numpy().data)
            except OSError as error:
                failure = failure or error
    return failure


def _chunks(num_bytes: int) -> list[int]:
    """Return the sizes of a file's chunks; an empty file has one."""
    return [min(CHUNK_BYTES, num_bytes - start) for start in range(0, max(num_bytes, 1), CHUNK_BYTES)]


def _mark(folder: Path) -> tuple[int, int]:
    """Return two numbers that no folder of another machine has; zeros where there is no folder."""
    try:
        found = folder.stat()
    except OSError:
        return 0, 0
    return found.st_ino & (1 << 63) - 1, found.st_mtime_ns
