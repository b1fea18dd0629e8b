"""An NCCL group moves exact bytes, and whatever its process does ends in an error within the deadline."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from offbeat.common.weights import nccl_group
from offbeat.common.weights.collectives import CollectiveError, CollectiveLateError, Seat, group_store, serve_store
from offbeat.common.weights.flat import WeightBuffer, make_layout
from offbeat.common.weights.nccl_group import ENVIRONMENT, NcclGroup
from offbeat.protocols.messages import NcclTransport
from tests.common.weights import nccl_stand_in
from tests.common.weights.nccl_stand_in import Fate
from tests.forked import context
from tests.gpu_report import MEASURED

pytestmark = pytest.mark.slow

WORLD_SIZE = 3
TIMEOUT_S = 1.0
GRACE_S = 0.5
LAYOUT = make_layout([("w", (250,))], torch.float32)
"""Four buckets of 300 bytes."""
EPOCH = 7


class Fleet:
    """One group for each rank, each with a thread that broadcasts."""

    def __init__(self, store: TCPStore, avoided: tuple[NcclTransport, ...], timeout_s: float) -> None:
        self.buffers = [WeightBuffer(LAYOUT) for _ in range(WORLD_SIZE)]
        self.buffers[0].flat.random_(256)
        self.groups = [
            NcclGroup(store, Seat(EPOCH, rank, WORLD_SIZE, 300, timeout_s), 0, avoided) for rank in range(WORLD_SIZE)
        ]
        self.num_beats = [0] * WORLD_SIZE
        self.errors: dict[int, CollectiveError] = {}

    def broadcast(self) -> None:
        threads = [threading.Thread(target=self.take_part, args=(rank,)) for rank in range(WORLD_SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def take_part(self, rank: int) -> None:
        try:
            self.groups[rank].broadcast(self.buffers[rank], partial(self.beat, rank))
        except CollectiveError as error:
            self.errors[rank] = error
            self.groups[rank].close()
            return
        if rank == 0:
            # As early as the learner may: when its own part is over.
            self.groups[0].close()

    def beat(self, rank: int) -> None:
        self.num_beats[rank] += 1


@pytest.fixture
def store() -> TCPStore:
    return serve_store("127.0.0.1", 0, 10.0, listen_on="127.0.0.1")


@pytest.fixture
def fleet_of(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets whose ranks have these fates."""
    monkeypatch.setattr(nccl_group, "context", context)
    monkeypatch.setattr(nccl_group, "GRACE_S", GRACE_S)
    made: list[Fleet] = []

    def make(fates: dict[int, Fate], avoided: tuple[NcclTransport, ...] = (), timeout_s: float = TIMEOUT_S) -> Fleet:
        monkeypatch.setattr(nccl_group, "serve", partial(nccl_stand_in.serve, fates=fates))
        made.append(fleet := Fleet(store, avoided, timeout_s))
        for group in fleet.groups:
            if "no device" not in fates.values():
                group.prepare()
        return fleet

    yield make
    for fleet in made:
        for group in fleet.groups:
            group._process.kill()
            group._process.join(5)
            assert group._process.exitcode is not None


def test_every_member_has_all_bytes_although_the_learner_closes_first(fleet_of: Callable[..., Fleet]) -> None:
    fleet = fleet_of({}, timeout_s=10.0)
    fleet.broadcast()
    assert fleet.errors == {}
    for buffer in fleet.buffers:
        assert torch.equal(buffer.flat, fleet.buffers[0].flat)
    # The construction, and four buckets.
    assert fleet.num_beats == [5] * WORLD_SIZE


def test_group_is_made_so_that_no_watchdog_can_end_the_process_and_transports_are_avoided(
    fleet_of: Callable[..., Fleet], store: TCPStore
) -> None:
    fleet_of({}, avoided=("P2P", "SHM"), timeout_s=10.0).broadcast()
    for rank in range(WORLD_SIZE):
        settings = json.loads(group_store(store, EPOCH).get(f"recorded/{rank}"))
        assert settings.items() >= ENVIRONMENT.items()
        assert (settings["TORCH_NCCL_BLOCKING_WAIT"], settings["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("1", "0")
        assert (settings["NCCL_P2P_DISABLE"], settings["NCCL_SHM_DISABLE"]) == ("1", "1")
        assert settings["timeout_s"] == 10


@pytest.mark.parametrize(
    ("fate", "what", "is_late"),
    [
        ("hang in init", "the NCCL communicator of epoch 7 was not made: NCCL did not answer within", True),
        ("die in init", "the NCCL communicator of epoch 7 was not made: NCCL's process ended with exit status -9", False),
        ("no device", "NCCL's process did not start: CUDA error: out of memory", False),
        ("die", "bucket 2 of 4: NCCL's process ended with exit status -9", False),
        ("stop", "bucket 2 of 4: NCCL did not answer within", True),
        ("never complete", "bucket 2 of 4: Work WorkNCCL(SeqNum=2, OpType=BROADCAST) timed out in blocking wait.", True),
        ("hang in wait", "bucket 2 of 4: NCCL did not answer within", True),
    ],
)
def test_whatever_becomes_of_a_member_every_rank_has_an_error_within_the_deadline(
    fleet_of: Callable[..., Fleet], fate: Fate, what: str, is_late: bool
) -> None:
    fleet = fleet_of({1: fate})
    began = time.monotonic()
    fleet.broadcast()
    assert str(fleet.errors[1]).startswith(what)
    assert isinstance(fleet.errors[1], CollectiveLateError) is is_late
    assert 0 in fleet.errors, "rank 0 must not think that all have the weights"
    # Construction and two buckets at most, with processes to kill.
    assert time.monotonic() - began < 3 * (TIMEOUT_S + GRACE_S) + 10


def test_duplicate_gpu_is_refused_at_all_ranks_in_nccls_words(fleet_of: Callable[..., Fleet]) -> None:
    fleet = fleet_of(dict.fromkeys(range(WORLD_SIZE), "refuse"), timeout_s=10.0)
    fleet.broadcast()
    assert set(fleet.errors) == {0, 1, 2}
    for error in fleet.errors.values():
        assert "invalid usage" in str(error)
        assert str(error).endswith("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65000")
        assert "\n" not in str(error)


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_real_nccl_alone_passes_a_gigabyte_and_is_killed_at_the_end(
    store: TCPStore, record_property: Callable[[str, object], None]
) -> None:
    bucket_bytes = 64 << 20
    buffer = WeightBuffer(make_layout([("w", (1 << 29,))], torch.bfloat16))
    buffer.flat.random_(256)
    before = buffer.flat.clone()
    group = NcclGroup(store, Seat(EPOCH, 0, 1, bucket_bytes, 60.0), 0)
    beats: list[float] = []
    times = [time.monotonic()]
    try:
        for _ in range(3):
            group.broadcast(buffer, lambda: beats.append(time.monotonic()))
            times.append(time.monotonic())
    finally:
        group.close()
    assert group._process.exitcode is not None
    assert torch.equal(buffer.flat, before)
    assert len(beats) == 1 + 3 * (1 << 30) // bucket_bytes, "the communicator, and each bucket"
    record_property(MEASURED, f"NCCL alone: its process and communicator {beats[0] - times[0]:.1f} s until it asks")
    record_property(MEASURED, f"NCCL alone: 1 GiB from pinned host memory in {times[-1] - times[-2]:.3f} s")
