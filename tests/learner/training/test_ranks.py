"""Calls of rank 0 reach the other ranks: through bytes, and between two real processes."""

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore

from offbeat.common.weights.flat import Address, WeightBuffer, make_layout
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.learner.training import ranks
from offbeat.learner.training.ranks import (
    Close,
    Idle,
    LoadCheckpoint,
    RankedTrainer,
    SaveCheckpoint,
    SaveModel,
    ScoreTokens,
    Snapshot,
    Train,
    Tune,
)
from offbeat.protocols.messages import TensorSpec
from offbeat.protocols.payload import Segment, Turn
from tests.forked import context

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from offbeat.learner.training.trainer import Trainer

PATIENCE_S = 60.0


def make_rollout(num_tokens: int, seed: int = 0) -> Rollout:
    random = np.random.default_rng(seed)
    return Rollout(
        token_ids=random.integers(0, 2**31 - 1, num_tokens, dtype=np.int32),
        behavior_logprobs=-random.random(num_tokens, dtype=np.float32),
        reward=random.random(),
        finish_reason="length",
        segments=(Segment(3, 0), Segment(4, num_tokens)),
        turns=(Turn(2, num_tokens),) if seed % 2 else (),
        context_ids=np.arange(2 * (seed % 2), dtype=np.int32),
    )


def make_group(lengths: Sequence[int], lease_id: int = 7) -> Group:
    rollouts = tuple(make_rollout(length, seed) for seed, length in enumerate(lengths))
    return Group(lease_id, 5, np.array([1, 2, 3], np.int32), rollouts, "actor-0", 0.25)


def through_bytes(command: Any) -> Any:
    return ranks._decoder.decode(ranks._encoder.encode(command))


def assert_same_groups(actual: Sequence[Group], expected: Sequence[Group]) -> None:
    assert [type(group) for group in actual] == [Group] * len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours.prompt_token_ids, theirs.prompt_token_ids, strict=True)
        assert ours._replace(prompt_token_ids=0, rollouts=()) == theirs._replace(prompt_token_ids=0, rollouts=())  # type: ignore[arg-type]
        assert ours.oldest_version == theirs.oldest_version
        for mine, other in zip(ours.rollouts, theirs.rollouts, strict=True):
            np.testing.assert_array_equal(mine.token_ids, other.token_ids, strict=True)
            np.testing.assert_array_equal(mine.behavior_logprobs, other.behavior_logprobs, strict=True)
            np.testing.assert_array_equal(mine.context_ids, other.context_ids, strict=True)
            assert mine._asdict().keys() == other._asdict().keys()
            arrays = {"token_ids": 0, "behavior_logprobs": 0, "context_ids": 0}
            assert mine._replace(**arrays) == other._replace(**arrays)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), max_size=4))
def test_groups_survive_the_way_to_the_other_ranks(shapes: list[list[int]]) -> None:
    groups = [make_group(lengths, lease_id) for lease_id, lengths in enumerate(shapes)]
    heard = through_bytes(Train(groups))
    assert isinstance(heard, Train)
    assert_same_groups(heard.groups, groups)


@pytest.mark.parametrize(
    "command",
    [
        Idle(),
        Snapshot(Address("/proc/7/fd/8", "/memfd:offbeat-é (deleted)")),
        Tune(None, 0.25, 1e-4),
        ScoreTokens([1, 2, 3]),
        SaveCheckpoint("/a folder/é", b"\x00\xff"),
        LoadCheckpoint("x"),
        SaveModel("y"),
        Close(),
    ],
    ids=lambda command: type(command).__name__,
)
def test_command_survives_the_way_to_the_other_ranks(command: Any) -> None:
    assert through_bytes(command) == command


LAYOUT = make_layout([("w", (16,))], torch.float32)


class FakeTrainer:
    """A trainer that records its calls."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.policy_version = 0
        self.device = torch.device("cpu")
        self.calls: list[tuple[str, Any]] = []

    def train_batch(self, groups: list[Group]) -> list[dict[str, Any]]:
        self.calls.append(("train_batch", groups))
        self.policy_version += 1
        return [{"loss/policy": 0.5}]

    def tune(self, *, clip_low: float | None, clip_high: float | None, learning_rate: float) -> None:
        self.calls.append(("tune", (clip_low, clip_high, learning_rate)))

    def layout(self) -> tuple[TensorSpec, ...]:
        return LAYOUT

    def snapshot(self, views: dict[str, torch.Tensor] | None) -> None:
        first_byte_and_address = None if views is None else (int(views["w"].view(torch.uint8)[0]), views["w"].data_ptr())
        self.calls.append(("snapshot", first_byte_and_address))

    def score(self, token_ids: list[int]) -> SimpleNamespace:
        self.calls.append(("score", token_ids))
        return SimpleNamespace(logprobs=np.zeros(len(token_ids) - 1, np.float32))

    def save_checkpoint(self, folder: Path, extra: bytes) -> None:
        self.calls.append(("save_checkpoint", (folder, extra)))

    def load_checkpoint(self, folder: Path) -> bytes:
        self.calls.append(("load_checkpoint", folder))
        return b"kept"

    def save_model(self, folder: Path) -> None:
        self.calls.append(("save_model", folder))

    def close(self) -> None:
        self.calls.append(("close", None))


def command_all(trainer: RankedTrainer) -> None:
    """Make every call of rank 0 once."""
    trainer.idle()
    assert trainer.load_checkpoint(Path("c")) == b"kept"
    assert trainer.train_batch([make_group([3, 4]), make_group([1])]) == [{"loss/policy": 0.5}]
    trainer.tune(clip_low=None, clip_high=0.25, learning_rate=1e-4)
    buffers = [WeightBuffer(LAYOUT) for _ in range(3)]
    buffers[2].address = Address(buffers[2].address.path, "/memfd:offbeat-of-another-machine (deleted)")
    for value, buffer in enumerate([buffers[0], buffers[1], buffers[0], buffers[2]], start=1):
        buffer.flat.fill_(value)
        trainer.snapshot(buffer)
    assert len(trainer.score([1, 2, 3]).logprobs) == 2
    trainer.save_checkpoint(Path("c"), b"\x00\xff")
    trainer.save_model(Path("m"))
    trainer.close()


def run_rank(rank: int, store: str, connection: Connection, is_fatal: bool) -> None:
    """Run one rank's process; rank 0 dies after its first call if `is_fatal`."""
    dist.init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2)
    fake = FakeTrainer(world_size=2)
    trainer = RankedTrainer(cast("Trainer", fake))
    if rank:
        try:
            trainer.follow()
        except RuntimeError as error:
            connection.send(error)
            return
    else:
        if is_fatal:
            trainer.save_model(Path("m"))
            os._exit(1)
        command_all(trainer)
    connection.send(fake.calls)
    dist.destroy_process_group()


def run_both(store: Path, *, is_fatal: bool = False) -> list[Any]:
    """Run two ranks; return the message of each, None for one that died before it sent any."""
    connections, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(rank, str(store), theirs, is_fatal), daemon=True)
        process.start()
        theirs.close()
        connections.append(ours)
        processes.append(process)
    try:
        return [receive(connection) for connection in connections]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
            process.join(10)


def receive(connection: Connection) -> Any:
    assert connection.poll(PATIENCE_S)
    try:
        return connection.recv()
    except EOFError:
        return None


def test_other_rank_makes_every_call_of_rank_0(tmp_path: Path) -> None:
    first, second = run_both(tmp_path / "store")
    assert [name for name, _ in first] == [name for name, _ in second]
    of_first, of_second = (dict(call for call in calls if call[0] != "snapshot") for calls in (first, second))
    assert_same_groups(of_second.pop("train_batch"), of_first.pop("train_batch"))
    assert of_second == of_first
    assert of_second["save_checkpoint"] == (Path("c"), b"\x00\xff")
    assert of_second["tune"] == (None, 0.25, 1e-4)


def test_other_rank_has_the_buffer_of_rank_0_where_it_can_map_it(tmp_path: Path) -> None:
    buffers = [[buffer for name, buffer in calls if name == "snapshot"] for calls in run_both(tmp_path / "store")]
    assert [value for value, _ in buffers[0]] == [1, 2, 3, 4]
    *shared, lost = buffers[1]
    assert lost is None
    assert [value for value, _ in shared] == [1, 2, 3]
    addresses = [address for _, address in shared]
    assert addresses[0] == addresses[2] != addresses[1], "mapped once"


def test_death_of_rank_0_ends_the_other_rank_with_an_error(tmp_path: Path) -> None:
    first, second = run_both(tmp_path / "store", is_fatal=True)
    assert first is None
    assert isinstance(second, RuntimeError)


def test_single_rank_needs_no_process_group() -> None:
    was_initialized = dist.is_initialized()
    fake = FakeTrainer(world_size=1)
    command_all(RankedTrainer(cast("Trainer", fake)))
    assert [name for name, _ in fake.calls][-1] == "close"
    assert dist.is_initialized() == was_initialized
