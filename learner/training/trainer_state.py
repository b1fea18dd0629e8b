"""The trainer's state on disk: the files of a checkpoint folder that continue a run.

policy.safetensors, critic.safetensors   every weight, whole, under the module's names; of a critic only if it has its own trunk
rank-00000.safetensors, .msgpack, ...    each rank's part of the optimizer's state, and its random state
trainer.json, adapted.json, extra.bin    what a trainer must have in common with it; adapted numbers; the caller's bytes
manifest.json                            size and checksum of each of these files

All of them are data: safetensors, with msgpack or JSON for the values around the tensors. Reading them executes nothing.
"""

import contextlib
import math
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.common.errors import one_line
from offbeat.common.processes.files import patiently
from offbeat.common.settings.learning_sections import LoraSection
from offbeat.learner.objectives.reward_shaping import RunningMoments
from offbeat.learner.policy.process_group import gather_tensors
from offbeat.learner.policy.zero import full_shape, gathered_parameters, muted_prints, optimizer_state, restore_state
from offbeat.learner.training import checkpoints

WEIGHTS_FILE = "policy.safetensors"
_ENGINES = ((WEIGHTS_FILE, "optimizer"), ("critic.safetensors", "critic"))
"""For the policy's engine and the critic's: the file of its weights, and the name of its optimizer's state in a rank's file."""
_META_FILE = "trainer.json"

_ADAPTIVE_FILE = "adapted.json"
_TEXT_BYTES = 400
"""Longest text with which a rank says why it failed."""

_TENSOR = 1
"""Msgpack's extension code of a tensor, whose content is its name in the safetensors file."""


class CheckpointMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The properties of a checkpoint that must equal those of the trainer that loads it, and its version."""

    policy_version: int
    """Optimizer steps taken; need not equal the trainer's."""
    world_size: int
    zero_stage: int
    dtype: str
    lora: LoraSection
    has_critic: bool
    has_own_trunk: bool = False
    """The critic has a trunk of its own."""


class AdaptiveState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers that a run adapts besides its weights; part of its checkpoints."""

    kl_coefficient: float
    """Coefficient of the KL in the loss or in the reward; 0 without either."""
    rewards: RunningMoments = RunningMoments()
    """Moments of all rewards so far, where `reward.norm_mean` or `reward.norm_std` is "running"."""


def read_version(folder: Path) -> int | None:
    """Return the policy version of the weights in a checkpoint; None where that cannot be read."""
    try:
        return msgspec.json.decode((folder / _META_FILE).read_bytes(), type=CheckpointMeta).policy_version
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def save_state(
    folder: Path, engines: Sequence[Any], meta: CheckpointMeta, adaptive: AdaptiveState, extra: bytes, *, rank: int
) -> None:
    """Write weights, optimizer, random state and the given values; a collective. `extra` counts on rank 0 only.

    `engines`: `learner.policy.networks.Networks.engines`.

    `folder` appears at the end, and whole: see `learner.training.checkpoints`. Where one rank cannot write, every rank raises
    `CheckpointFailedError`, and nothing is left.
    """
    is_first = rank == 0
    # Whole, in CPU memory; empty on ranks that do not keep them.
    weights = [
        {name: one.to("cpu", copy=True) for name, one in gathered_parameters(engine.module.named_parameters()) if is_first}
        for engine in engines
    ]

    def write(partial: Path) -> None:
        partial.mkdir(exist_ok=True)
        optimizers = {part: optimizer_state(engine) for (_, part), engine in zip(_ENGINES, engines, strict=False)}
        write_tree(partial / _rank_file(rank), {**optimizers, "random": _read_random_state()})
        if is_first:
            for (name, _), of_engine in zip(_ENGINES, weights, strict=False):
                write_tensors(partial / name, of_engine)
            checkpoints.write_extra(partial, extra)
            (partial / _META_FILE).write_bytes(msgspec.json.encode(meta))
            (partial / _ADAPTIVE_FILE).write_bytes(msgspec.json.encode(adaptive))

    write_folder(folder, write, checkpoints.publish, rank=rank)


def largest_state(engines: Sequence[Any]) -> int:
    """Return the most bytes of what `save_state` writes of these engines; no collective."""
    return sum(
        math.prod(full_shape(parameter))
        * (checkpoints.BYTES_PER_PARAMETER if parameter.requires_grad else parameter.element_size())
        for engine in engines
        for parameter in engine.module.parameters()
    )


def write_folder(folder: Path, write: Callable[[Path], None], publish: Callable[[Path], None], *, rank: int) -> None:
    """Have every rank write its part of `partial_folder(folder)`, then the first rank publish it as `folder`; a collective.

    `write` gets the folder for its files: that one, or a far rank's own. Raises `CheckpointFailedError` on every rank when one
    of them cannot write, so that none waits for it, and leaves nothing.
    """
    partial = checkpoints.partial_folder(folder)
    is_first = rank == 0

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    try:
        _on_all_ranks(begin if is_first else None)
        far = find_far_ranks(partial)
        with own_place(partial, far) as place:
            _on_all_ranks(lambda: write(place))
            _agree(_collect(place, far, rank=rank))
        _on_all_ranks((lambda: publish(folder)) if is_first else None)
    except checkpoints.CheckpointFailedError:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load_state(
    folder: Path, engines: Sequence[Any], expected: CheckpointMeta, *, rank: int
) -> tuple[int, AdaptiveState, bytes]:
    """Restore weights, optimizer and random state; return policy version, adaptive state and the caller's bytes.

    A collective. `engines`: as in `save_state`. Raises ValueError if the checkpoint differs from `expected` in anything but the
    version.
    """
    far = find_far_ranks(folder)
    with own_place(folder, far) as place:
        # Under ZeRO-3 the ranks' own parts are all the weights.
        _hand_out(place, far, without={name for name, _ in _ENGINES} if expected.zero_stage == 3 else set(), rank=rank)
        return _load_state(place, engines, expected, rank=rank)


def _load_state(
    folder: Path, engines: Sequence[Any], expected: CheckpointMeta, *, rank: int
) -> tuple[int, AdaptiveState, bytes]:
    meta = msgspec.json.decode((folder / _META_FILE).read_bytes(), type=CheckpointMeta)
    expected = msgspec.structs.replace(expected, policy_version=meta.policy_version)
    if meta != expected:
        raise ValueError(
            f"checkpoint {folder} was saved with {meta}, this run has {expected}: resume with the same number of "
            "learner processes (launch.learner_processes), train.zero_stage, model.dtype, lora and critic"
        )
    state = read_tree(folder / _rank_file(rank))
    with muted_prints():
        for (name, part), engine in zip(_ENGINES, engines, strict=False):
            restore_state(engine, {} if meta.zero_stage == 3 else load_file(folder / name), state[part])
    _restore_random_state(state["random"])
    adaptive = msgspec.json.decode((folder / _ADAPTIVE_FILE).read_bytes(), type=AdaptiveState)
    return meta.policy_version, adaptive, checkpoints.read_extra(folder)


def _collect(place: Path, far: Sequence[int], *, rank: int) -> OSError | None:
    """Copy the files of far ranks to rank 0, one rank after the other; return the error of this rank's disk."""
    failures: list[OSError | None] = [None]
    for source in far:
        if rank in (0, source):
            names = [path.name for path in sorted(place.glob("*"))] if rank == source else []
            failures.append(copy_files(place, names, source=source, target=0))
    return next(filter(None, failures), None)


def _hand_out(place: Path, far: Sequence[int], *, without: Set[str], rank: int) -> None:
    """Copy from rank 0 to each far rank what it loads: all files but the other ranks' parts, and those named in `without`."""
    for target in far:
        if rank in (0, target):
            files = [path for path in sorted(place.rglob("*")) if path.is_file()] if rank == 0 else []
            wanted = [
                path.relative_to(place).as_posix() for path in files if _is_for(target, path) and path.name not in without
            ]
            failure = copy_files(place, wanted, source=0, target=target)
            if failure is not None:
                raise failure


def _on_all_ranks(act: Callable[[], None] | None) -> None:
    """Do what this rank has to do, if anything, and wait for the others; a collective.

    Raises `CheckpointFailedError` on every rank when it failed on one, so that none waits for the others later.
    """
    failure: OSError | None = None
    try:
        if act is not None:
            # Repeated from its start while no descriptor is free: what it wrote before is overwritten.
            patiently(act)
    except OSError as error:
        failure = error
    _agree(failure)


def _agree(failure: OSError | None) -> None:
    """Raise `CheckpointFailedError` on every rank where one of them had a failure; a collective."""
    said = "" if failure is None else os.strerror(failure.errno) if failure.errno else one_line(failure)
    padded = bytearray(said.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"))
    gathered = gather_tensors(torch.frombuffer(padded, dtype=torch.uint8))
    texts = [bytes(text).rstrip(b"\0").decode(errors="replace") for text in gathered.tolist()]
    if any(texts):
        failures = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        raise checkpoints.CheckpointFailedError(failures) from failure


def _is_for(rank: int, path: Path) -> bool:
    return not path.name.startswith("rank-") or path.stem == _rank_file(rank)


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}"


def _read_random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    # A checkpoint written without a GPU has no state of one.
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors to a safetensors file; raises OSError where the disk refuses, as for any other file."""
    with disk_errors(path):
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise an OSError about `path` for an error of the disk, which safetensors reports only in its error's text."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def write_tree(path: Path, tree: Any) -> None:
    """Write dicts, lists and plain values around tensors: `path.safetensors` and `path.msgpack`."""
    tensors: dict[str, Tensor] = {}

    def name_tensor(value: Any) -> msgspec.msgpack.Ext:
        if not isinstance(value, Tensor):
            raise NotImplementedError(f"a checkpoint cannot hold a {type(value).__name__}")
        name = str(len(tensors))
        tensors[name] = value
        return msgspec.msgpack.Ext(_TENSOR, name.encode())

    structure = msgspec.msgpack.encode(tree, enc_hook=name_tensor)
    write_tensors(path.with_suffix(".safetensors"), tensors)
    path.with_suffix(".msgpack").write_bytes(structure)


def read_tree(path: Path) -> Any:
    """Return what `write_tree` wrote, tensors in CPU memory; tuples have become lists."""
    tensors = load_file(path.with_suffix(".safetensors"))

    def find_tensor(code: int, data: memoryview) -> Tensor:
        assert code == _TENSOR
        return tensors[bytes(data).decode()]

    return msgspec.msgpack.decode(path.with_suffix(".msgpack").read_bytes(), ext_hook=find_tensor)


CHUNK_BYTES = 64 << 20


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
    listed = [(name, (folder / name).stat().st_size) for name in names]
    header = torch.frombuffer(bytearray(msgspec.msgpack.encode(listed)), dtype=torch.uint8)
    dist.send(torch.tensor([len(header)]), target)
    dist.send(header, target)
    failure: OSError | None = None
    for name, num_file_bytes in listed:
        with (folder / name).open("rb") as stream:
            for num_bytes in _chunks(num_file_bytes):
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
    for name, num_file_bytes in msgspec.msgpack.decode(header.numpy().tobytes(), type=list[tuple[str, int]]):
        path = folder / name
        for index, num_bytes in enumerate(_chunks(num_file_bytes)):
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
