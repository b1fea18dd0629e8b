"""Several learner ranks as one trainer: rank 0 runs the service, and the other ranks repeat its trainer calls.

Every trainer call is a collective that all ranks must enter. `RankedTrainer` on rank 0 broadcasts each call before it makes
it; the other ranks wait in `follow` and make the same calls.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never, get_args

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from offbeat.common.errors import LostProcessError
from offbeat.common.weights.flat import Address, WeightBuffer, buffer_bytes, map_bytes, named_views, pin
from offbeat.learner.leases.groups import Group
from offbeat.learner.policy.process_group import notice_lost_machines, reason_of
from offbeat.learner.training.checkpoints import CheckpointFailedError
from offbeat.protocols.messages import TensorSpec

if TYPE_CHECKING:
    from offbeat.learner.policy.networks import Scored
    from offbeat.learner.training.trainer import Trainer

COMMAND_TIMEOUT_S = 600.0
"""A rank fails after this long without a command. Rank 0 sends `Idle` while it waits for rollouts."""


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Raise `LostProcessError` for what torch.distributed raises in this context after another rank was lost."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no class of its own for errors, only its files' names in their texts.
        if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
            raise
        raise LostProcessError(
            f"another process of the learner was lost ({reason_of(error)}). Look at its log, its machine and the network "
            "between them; then start all processes again with run.resume=true"
        ) from error


class RankCommand(msgspec.Struct, tag=True):
    """A collective call, as rank 0 broadcasts it."""


class Idle(RankCommand):
    """A command without a call, which proves that rank 0 is alive."""


class Train(RankCommand):
    """`train_batch`."""

    groups: list[Group]


class Tune(RankCommand):
    """`tune`."""

    clip_low: float | None
    clip_high: float | None
    learning_rate: float


class Snapshot(RankCommand):
    """`snapshot`, into rank 0's memory where it can be mapped."""

    address: Address


class ScoreTokens(RankCommand, tag="Score"):
    """`score`."""

    token_ids: list[int]


class SaveCheckpoint(RankCommand):
    """`save_checkpoint`."""

    folder: str
    extra: bytes


class LoadCheckpoint(RankCommand):
    """`load_checkpoint`."""

    folder: str


class SaveModel(RankCommand):
    """`save_model`."""

    folder: str


class Close(RankCommand):
    """`close`; the other ranks return from `follow`."""


AnyRankCommand = Idle | Train | Tune | Snapshot | ScoreTokens | SaveCheckpoint | LoadCheckpoint | SaveModel | Close


def _decode_array(annotation: Any, data: Any) -> Any:
    dtype = get_args(get_args(annotation)[1])[0]
    return np.frombuffer(data, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=lambda array: np.asarray(array).tobytes())
_decoder = msgspec.msgpack.Decoder(AnyRankCommand, dec_hook=_decode_array)


class RankedTrainer:
    """A `Trainer` whose calls on rank 0 happen on every rank."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self._views: dict[Address, dict[str, torch.Tensor] | None] = {}
        """Views into rank 0's buffers, None where one cannot be reached; on ranks above 0."""
        self._group: dist.ProcessGroup | None = None
        if trainer.world_size > 1:
            # gloo whatever the trainer's backend: commands are host bytes, and must not queue behind GPU work.
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=COMMAND_TIMEOUT_S))
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
            notice_lost_machines()

    @property
    def policy_version(self) -> int:
        """Optimizer steps that the weights have taken."""
        return self._trainer.policy_version

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self._trainer.device

    def layout(self) -> tuple[TensorSpec, ...]:
        """`Trainer.layout`; no collective."""
        return self._trainer.layout()

    def idle(self) -> None:
        """Prove to the other ranks that rank 0 is alive."""
        self._broadcast(Idle())

    def train_batch(self, groups: list[Group]) -> list[dict[str, Any]]:
        """`Trainer.train_batch`."""
        self._broadcast(Train(groups))
        return self._trainer.train_batch(groups)

    def tune(self, *, clip_low: float | None, clip_high: float | None, learning_rate: float) -> None:
        """`Trainer.tune`."""
        self._broadcast(Tune(clip_low, clip_high, learning_rate))
        self._trainer.tune(clip_low=clip_low, clip_high=clip_high, learning_rate=learning_rate)

    def snapshot(self, buffer: WeightBuffer) -> None:
        """`Trainer.snapshot`."""
        self._broadcast(Snapshot(buffer.address))
        self._trainer.snapshot(dict(buffer.views()))

    def score(self, token_ids: list[int]) -> "Scored":
        """`Trainer.score`."""
        self._broadcast(ScoreTokens(token_ids))
        return self._trainer.score(token_ids)

    def save_checkpoint(self, folder: Path, extra: bytes) -> None:
        """`Trainer.save_checkpoint`."""
        self._broadcast(SaveCheckpoint(str(folder), extra))
        self._trainer.save_checkpoint(folder, extra)

    def checkpoint_bytes(self) -> int:
        """`Trainer.checkpoint_bytes`; no collective."""
        return self._trainer.checkpoint_bytes()

    def load_checkpoint(self, folder: Path) -> bytes:
        """`Trainer.load_checkpoint`."""
        self._broadcast(LoadCheckpoint(str(folder)))
        return self._trainer.load_checkpoint(folder)

    def save_model(self, folder: Path) -> None:
        """`Trainer.save_model`."""
        self._broadcast(SaveModel(str(folder)))
        self._trainer.save_model(folder)

    def close(self) -> None:
        """End every rank's trainer."""
        self._broadcast(Close())
        self._trainer.close()

    def follow(self) -> None:
        """Repeat the calls of rank 0 until it closes; for ranks above 0.

        Consumes: commands. Waits for: rank 0, at most `COMMAND_TIMEOUT_S`. Unblocked by: the next command, or rank 0's death.
        """
        while True:
            match self._receive():
                case Train(groups=groups):
                    self._trainer.train_batch(groups)
                case Tune(clip_low=clip_low, clip_high=clip_high, learning_rate=learning_rate):
                    self._trainer.tune(clip_low=clip_low, clip_high=clip_high, learning_rate=learning_rate)
                case Snapshot(address=address):
                    self._trainer.snapshot(self._views_of(address))
                case ScoreTokens(token_ids=token_ids):
                    self._trainer.score(token_ids)
                case SaveCheckpoint(folder=folder, extra=extra):
                    # Rank 0 reports it, and every rank goes on.
                    with contextlib.suppress(CheckpointFailedError):
                        self._trainer.save_checkpoint(Path(folder), extra)
                case LoadCheckpoint(folder=folder):
                    self._trainer.load_checkpoint(Path(folder))
                case SaveModel(folder=folder):
                    with contextlib.suppress(CheckpointFailedError):
                        self._trainer.save_model(Path(folder))
                case Close():
                    self._trainer.close()
                    return
                case Idle():
                    pass
                case unknown:
                    assert_never(unknown)

    def _views_of(self, address: Address) -> dict[str, torch.Tensor] | None:
        if address not in self._views:
            layout, device = self._trainer.layout(), self._trainer.device
            self._views[address] = None
            # Rank 0's memory cannot be mapped from another machine or another container.
            with contextlib.suppress(OSError, RuntimeError):
                flat = map_bytes(address, buffer_bytes(layout))
                if device.index is not None:
                    pin(flat.untyped_storage(), device.index)
                self._views[address] = dict(named_views(flat, layout))
        return self._views[address]

    def _broadcast(self, command: AnyRankCommand) -> None:
        if self._group is None:
            return
        body = torch.frombuffer(bytearray(_encoder.encode(command)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(body)]), src=0, group=self._group)
        dist.broadcast(body, src=0, group=self._group)

    def _receive(self) -> AnyRankCommand:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._group)
        body = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(body, src=0, group=self._group)
        return _decoder.decode(body.numpy().tobytes())
