"""The chain of differences leads from any version in it to the newest, and stays smaller than the weights."""

import pytest
import torch

from offbeat.common.weights.deltas import apply_delta, word_bytes
from offbeat.common.weights.flat import make_layout
from offbeat.learner.weights.double_buffer import DoubleBuffer, WeightSnapshot
from offbeat.learner.weights.server import DeltaChain
from offbeat.protocols.messages import MAX_BASES

LAYOUT = make_layout([("a", (3000,)), ("b", ()), ("c", (70, 30))], torch.bfloat16)
CHUNK_BYTES = 1 << 12


class Bench:
    """A trainer whose versions are lent one after the other."""

    def __init__(self) -> None:
        self.snapshots = DoubleBuffer(LAYOUT)
        self.chain = DeltaChain(LAYOUT, CHUNK_BYTES)
        self.versions: list[torch.Tensor] = []
        self.checksums: list[int] = []
        self._generator = torch.Generator().manual_seed(0)

    def step(self, share: float) -> torch.Tensor:
        """Return the newest weights with this share of the bytes drawn anew."""
        flat = self.versions[-1].clone() if self.versions else torch.zeros(len(self.snapshots._current.buffer.flat)).byte()
        is_changed = torch.rand(len(flat), generator=self._generator) < share
        flat[is_changed] = torch.randint(0, 256, (int(is_changed.sum()),), dtype=torch.uint8, generator=self._generator)
        return flat

    def lend(self, flat: torch.Tensor) -> WeightSnapshot:
        with self.snapshots.writing() as buffer:
            buffer.flat.copy_(flat)
            self.snapshots.publish(len(self.versions))
        snapshot = self.snapshots.take()
        self.chain.advance(snapshot)
        self.snapshots.give_back(snapshot)
        self.versions.append(flat)
        self.checksums.append(snapshot.checksum)
        return snapshot

    def follow(self, version: int) -> torch.Tensor:
        """Return what an actor makes of this version and the differences."""
        held = self.versions[version].clone()
        bases = [delta.base for delta in self.chain.deltas]
        for delta in self.chain.deltas[bases.index(self.checksums[version]) :]:
            for chunk, piece in zip(held.split(CHUNK_BYTES), delta.pieces, strict=True):
                apply_delta(piece.numpy().tobytes(), chunk.numpy(), word_bytes(LAYOUT))
        return held


def test_chain_leads_from_every_version_to_the_newest() -> None:
    bench = Bench()
    bench.lend(bench.step(1.0))
    assert bench.chain.deltas == ()
    for _ in range(4):
        bench.lend(bench.step(0.01))
    assert [delta.base for delta in bench.chain.deltas] == bench.checksums[:-1]
    for version in range(4):
        assert torch.equal(bench.follow(version), bench.versions[-1])


def test_oldest_differences_go_when_all_would_be_larger_than_the_weights() -> None:
    bench = Bench()
    full_bytes = len(bench.lend(bench.step(1.0)).buffer.flat)
    for _ in range(12):
        bench.lend(bench.step(0.05))
    kept = bench.chain.deltas
    assert 1 < len(kept) < 12
    assert [delta.base for delta in kept] == bench.checksums[-1 - len(kept) : -1]
    sizes = [delta.num_bytes for delta in kept]
    assert sum(sizes) < full_bytes <= sum(sizes) + max(sizes)


def test_version_that_shares_nothing_with_the_one_before_is_reached_by_no_difference() -> None:
    bench = Bench()
    for share in (1.0, 0.01, 1.0):
        bench.lend(bench.step(share))
    assert bench.chain.deltas == ()
    bench.lend(bench.step(0.01))
    assert [delta.base for delta in bench.chain.deltas] == bench.checksums[-2:-1]


def test_no_more_differences_are_kept_than_an_announcement_may_name(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.lend(bench.step(1.0))
    for _ in range(MAX_BASES + 3):
        bench.lend(bench.step(0.001))
    assert [delta.base for delta in bench.chain.deltas] == bench.checksums[-1 - MAX_BASES : -1]


def test_version_with_the_same_bytes_adds_nothing_to_the_chain() -> None:
    bench = Bench()
    for share in (1.0, 0.01, 0.0, 0.01):
        bench.lend(bench.step(share))
    assert [delta.base for delta in bench.chain.deltas] == [bench.checksums[0], bench.checksums[1]]
    assert torch.equal(bench.follow(0), bench.versions[-1])


def test_weights_that_return_to_an_older_version_end_the_chain() -> None:
    bench = Bench()
    for share in (1.0, 0.01, 0.01):
        bench.lend(bench.step(share))
    bench.lend(bench.versions[0])
    assert bench.chain.deltas == ()
    bench.lend(bench.step(0.01))
    assert torch.equal(bench.follow(3), bench.versions[-1])
