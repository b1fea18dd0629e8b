"""The trainer's state on disk: the files of a checkpoint folder that continue a run."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.common.config import LoraSection
from offbeat.learner.objectives.reward_shaping import RunningMoments
from offbeat.learner.policy.zero import muted_prints
from offbeat.learner.training import checkpoints

_DEEPSPEED_TAG = "state"
"""Folder of DeepSpeed's files inside a checkpoint."""
_META_FILE = "trainer.json"
_ADAPTIVE_FILE = "adapted.json"


class CheckpointMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The properties of a checkpoint that must equal those of the trainer that loads it, and its version."""

    policy_version: int
    """Optimizer steps taken; need not equal the trainer's."""
    world_size: int
    zero_stage: int
    dtype: str
    lora: LoraSection
    has_critic: bool


class AdaptiveState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers that a run adapts besides its weights; part of its checkpoints."""

    kl_coefficient: float
    """Coefficient of the KL in the loss or in the reward; 0 without either."""
    rewards: RunningMoments = RunningMoments()
    """Moments of all rewards so far, where `reward.norm_mean` or `reward.norm_std` is "running"."""


class LoadedState(NamedTuple):
    """The part of a checkpoint that does not go into DeepSpeed or torch."""

    policy_version: int
    adaptive: AdaptiveState
    extra: bytes
    """The bytes that the caller saved with the checkpoint."""


def save_state(folder: Path, engine: Any, meta: CheckpointMeta, adaptive: AdaptiveState, extra: bytes, *, rank: int) -> None:
    """Write weights, optimizer, random state and the given values; a collective. `extra` counts on rank 0 only.

    `folder` appears at the end, and whole: see `learner.training.checkpoints`.
    """
    partial = checkpoints.partial_folder(folder)
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    # DeepSpeed makes the folder and has the other ranks wait for that.
    with muted_prints():
        engine.save_checkpoint(str(partial), tag=_DEEPSPEED_TAG, save_latest=False)
    torch.save(_read_random_state(), partial / _random_file(rank))
    dist.barrier()
    if rank == 0:
        checkpoints.write_extra(partial, extra)
        (partial / _META_FILE).write_bytes(msgspec.json.encode(meta))
        (partial / _ADAPTIVE_FILE).write_bytes(msgspec.json.encode(adaptive))
        checkpoints.publish(folder)
    dist.barrier()


def load_state(folder: Path, engine: Any, expected: CheckpointMeta, *, rank: int) -> LoadedState:
    """Restore weights, optimizer and random state, and return the rest; a collective.

    Raises ValueError if the checkpoint differs from `expected` in anything but the version.
    """
    meta = msgspec.json.decode((folder / _META_FILE).read_bytes(), type=CheckpointMeta)
    expected = msgspec.structs.replace(expected, policy_version=meta.policy_version)
    if meta != expected:
        raise ValueError(
            f"checkpoint {folder} was saved with {meta}, this run has {expected}: resume with the same number of "
            "learner processes (launch.learner_processes), train.zero_stage, model.dtype, lora and critic"
        )
    with muted_prints():
        loaded, _ = engine.load_checkpoint(str(folder), tag=_DEEPSPEED_TAG)
    if loaded is None:
        raise FileNotFoundError(f"checkpoint {folder} holds no DeepSpeed state")
    _restore_random_state(torch.load(folder / _random_file(rank), weights_only=True))
    adaptive = msgspec.json.decode((folder / _ADAPTIVE_FILE).read_bytes(), type=AdaptiveState)
    return LoadedState(meta.policy_version, adaptive, checkpoints.read_extra(folder))


def _random_file(rank: int) -> str:
    return f"random-{rank}.pt"


def _read_random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
