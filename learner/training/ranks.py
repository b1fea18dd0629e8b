"""Several learner ranks as one trainer: rank 0 runs the service and tells the others what it is about to do.

Every trainer call is a collective that all ranks must enter. `RankedTrainer` broadcasts the call on rank 0 before it makes
it; the other ranks sit in `follow` and make the same calls.
"""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from offbeat.common.weights import WeightBuffer
from offbeat.learner.leases.groups import Group
from offbeat.protocols.messages import TensorSpec

if TYPE_CHECKING:
    from offbeat.learner.training.trainer import Scored, Trainer

COMMAND_TIMEOUT_S = 600.0
"""A rank that hears nothing for so long takes rank 0 for dead. Rank 0 says `Idle` while it waits for rollouts."""


class Command(msgspec.Struct, tag=True):
    """One collective call."""


class Idle(Command):
    """Nothing to do; rank 0 lives."""


class Train(Command):
    """`train_batch`."""

    groups: list[Group]


class Tune(Command):
    """`tune`."""

    clip_low: float | None
    clip_high: float | None
    learning_rate: float


class Snapshot(Command):
    """`snapshot`; only rank 0 has a buffer."""


class Score(Command):
    """`score`."""

    token_ids: list[int]


class SaveCheckpoint(Command):
    """`save_checkpoint`."""

    folder: str
    extra: bytes


class LoadCheckpoint(Command):
    """`load_checkpoint`."""

    folder: str


class SaveModel(Command):
    """`save_model`."""

    folder: str


class Close(Command):
    """The end."""


AnyCommand = Idle | Train | Tune | Snapshot | Score | SaveCheckpoint | LoadCheckpoint | SaveModel | Close


def _encode_array(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def _decode_array(annotation: Any, data: Any) -> Any:
    dtype = get_args(get_args(annotation)[1])[0]
    return np.frombuffer(data, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(AnyCommand, dec_hook=_decode_array)


class RankedTrainer:
    """A `Trainer` whose calls on rank 0 happen on every rank."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        # gloo whatever the trainer's backend: commands are host bytes, and must not queue behind GPU work.
        several = trainer.world_size > 1
        self._group: dist.ProcessGroup | None = None
        if several:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=COMMAND_TIMEOUT_S))
            assert isinstance(group, dist.ProcessGroup)
            self._group = group

    @property
    def policy_version(self) -> int:
        """Optimizer steps behind the weights."""
        return self._trainer.policy_version

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._trainer.device

    def layout(self) -> tuple[TensorSpec, ...]:
        """The flat weight buffer's parameters; no collective."""
        return self._trainer.layout()

    def idle(self) -> None:
        """Tell the other ranks that this one lives."""
        self._tell(Idle())

    def train_batch(self, groups: list[Group]) -> list[dict[str, Any]]:
        """`Trainer.train_batch`."""
        self._tell(Train(groups))
        return self._trainer.train_batch(groups)

    def tune(self, *, clip_low: float | None, clip_high: float | None, learning_rate: float) -> None:
        """`Trainer.tune`."""
        self._tell(Tune(clip_low, clip_high, learning_rate))
        self._trainer.tune(clip_low=clip_low, clip_high=clip_high, learning_rate=learning_rate)

    def snapshot(self, buffer: WeightBuffer) -> None:
        """`Trainer.snapshot`."""
        self._tell(Snapshot())
        self._trainer.snapshot(buffer)

    def score(self, token_ids: list[int]) -> "Scored":
        """`Trainer.score`."""
        self._tell(Score(token_ids))
        return self._trainer.score(token_ids)

    def save_checkpoint(self, folder: Path, extra: bytes) -> None:
        """`Trainer.save_checkpoint`."""
        self._tell(SaveCheckpoint(str(folder), extra))
        self._trainer.save_checkpoint(folder, extra)

    def load_checkpoint(self, folder: Path) -> bytes:
        """`Trainer.load_checkpoint`."""
        self._tell(LoadCheckpoint(str(folder)))
        return self._trainer.load_checkpoint(folder)

    def save_model(self, folder: Path) -> None:
        """`Trainer.save_model`."""
        self._tell(SaveModel(str(folder)))
        self._trainer.save_model(folder)

    def close(self) -> None:
        """End every rank's trainer."""
        self._tell(Close())
        self._trainer.close()

    def follow(self) -> None:
        """Do what rank 0 does, until it closes (ranks above 0).

        Consumes: commands. Waits for: rank 0, at most `COMMAND_TIMEOUT_S`. Unblocked by: the next command, or its death.
        """
        while True:
            match self._hear():
                case Train(groups=groups):
                    self._trainer.train_batch(groups)
                case Tune(clip_low=clip_low, clip_high=clip_high, learning_rate=learning_rate):
                    self._trainer.tune(clip_low=clip_low, clip_high=clip_high, learning_rate=learning_rate)
                case Snapshot():
                    self._trainer.snapshot(None)
                case Score(token_ids=token_ids):
                    self._trainer.score(token_ids)
                case SaveCheckpoint(folder=folder, extra=extra):
                    self._trainer.save_checkpoint(Path(folder), extra)
                case LoadCheckpoint(folder=folder):
                    self._trainer.load_checkpoint(Path(folder))
                case SaveModel(folder=folder):
                    self._trainer.save_model(Path(folder))
                case Close():
                    self._trainer.close()
                    return
                case Idle():
                    pass

    def _tell(self, command: AnyCommand) -> None:
        if self._group is None:
            return
        body = torch.frombuffer(bytearray(_encoder.encode(command)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(body)]), src=0, group=self._group)
        dist.broadcast(body, src=0, group=self._group)

    def _hear(self) -> AnyCommand:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._group)
        body = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(body, src=0, group=self._group)
        return _decoder.decode(body.numpy().tobytes())
