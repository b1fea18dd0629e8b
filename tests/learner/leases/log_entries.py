"""Made-up entries of a rollout log, and the operations of tests on its files."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from hypothesis import strategies as st

from offbeat.learner.leases import rollout_log
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained, Tuned, Weighed
from offbeat.learner.leases.log_reading import Position, Record, read_log
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.payload import CompletionMeta, ExpertsMeta, Segment, Turn

HUGE = 1 << 40


class Entry(NamedTuple):
    """The arguments of `RolloutLog.append`."""

    event: LeaseEvent
    arrays: tuple[np.ndarray, ...] = ()

    @property
    def content(self) -> tuple[LeaseEvent, list[bytes]]:
        return self.event, [array.tobytes() for array in self.arrays]


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@st.composite
def accepted_entries(draw: st.DrawFn) -> Entry:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    completions = tuple(
        CompletionMeta(length, draw(st.sampled_from(["stop", "length"])), draw(FLOATS), (Segment(draw(IDS), 0),))
        for length in lengths
    )
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    token_ids = generator.integers(-(1 << 31), 1 << 31, sum(lengths), np.int32)
    arrays: list[np.ndarray] = [token_ids, generator.normal(size=sum(lengths)).astype(np.float32)]
    experts = None
    match draw(st.sampled_from(["alone", "turns", "experts"])):
        case "turns":
            num_context = draw(st.integers(0, 9))
            completions = (msgspec.structs.replace(completions[0], turns=(Turn(num_context, lengths[0]),)), *completions[1:])
            arrays.append(generator.integers(0, 1 << 31, num_context, np.int32))
        case "experts":
            arrays.append(generator.integers(0, 256, draw(st.integers(1, 30)), np.uint8))
            experts = ExpertsMeta(1, 2, 2, len(arrays[-1]))
    event = Accepted(
        at=draw(FLOATS),
        lease_id=draw(IDS),
        actor=draw(NAMES),
        completions=completions,
        generate_s=0.5,
        policy_version=3,
        experts=experts,
        prompt_hash=0,
        reward_s=0.0,
    )
    return Entry(event, tuple(arrays))


IDS = st.integers(0, (1 << 63) - 1)
FLOATS = st.floats(allow_nan=False)
NAMES = st.text(max_size=20)
OTHER_EVENTS = st.one_of(
    st.builds(Started, at=FLOATS, run_id=NAMES, learner_incarnation=IDS, policy_version=IDS),
    st.builds(
        Granted,
        at=FLOATS,
        lease_id=IDS,
        prompt_id=IDS,
        epoch=IDS,
        actor=NAMES,
        policy_version=IDS,
        oldest_version=IDS,
        prompt_hash=IDS,
        epoch_size=IDS,
    ),
    st.builds(Dropped, at=FLOATS, lease_id=IDS, reason=NAMES, is_final=st.booleans()),
    st.builds(Expired, at=FLOATS, lease_id=IDS, reason=NAMES),
    st.builds(
        Trained,
        at=FLOATS,
        lease_ids=st.lists(IDS).map(tuple),
        prompt_hashes=st.lists(IDS).map(tuple),
        policy_version=IDS,
        num_steps=IDS,
        selected_at=FLOATS,
        selected_after=IDS,
    ),
    st.builds(Tuned, at=FLOATS, settings=st.dictionaries(NAMES, NAMES), who=NAMES, reason=NAMES, policy_version=IDS),
    st.builds(Weighed, at=FLOATS, shares=st.dictionaries(NAMES, FLOATS), policy_version=IDS),
)
ENTRIES = st.one_of(accepted_entries(), OTHER_EVENTS.map(Entry))


def open_log(folder: Path, **changes: Any) -> RolloutLog:
    options = {"run_id": "run", "fsync": "off", "segment_bytes": HUGE, "retain_bytes": HUGE, "min_free_bytes": 0} | changes
    return RolloutLog(folder, **options)


def append_all(log: RolloutLog, entries: list[Entry]) -> list[Position]:
    return [log.append(entry.event, *entry.arrays) for entry in entries]


def dropped(lease_id: int, reason: str = "returned") -> Entry:
    return Entry(Dropped(at=0.0, lease_id=lease_id, reason=reason, is_final=False))


def contents(records: Iterator[Record]) -> list[tuple[LeaseEvent, list[bytes]]]:
    return [(record.event, [bytes(array) for array in record.arrays]) for record in records]


def lease_ids(folder: Path, start: Position | None = None) -> list[int]:
    events = [record.event for record in read_log(folder, start)]
    return [event.lease_id for event in events if isinstance(event, Dropped | Accepted)]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


@contextmanager
def new_folder() -> Iterator[Path]:
    """Yield a new folder for one example of a property, in memory if possible."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder) / "log"


@contextmanager
def cuts() -> Iterator[list[int]]:
    """Collect the numbers of bytes that opened logs report to have cut off."""
    cut: list[int] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert isinstance(record.args, tuple)
            number = record.args[2]
            assert isinstance(number, int)
            cut.append(number)

    collector = Collector()
    rollout_log.logger.addHandler(collector)
    try:
        yield cut
    finally:
        rollout_log.logger.removeHandler(collector)
