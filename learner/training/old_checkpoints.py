"""Checkpoints of earlier versions of offbeat: DeepSpeed's own files, which are pickles, read as data only."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat.common.errors import ServiceError
from offbeat.learner.policy.zero import muted_prints
from offbeat.learner.training.checkpoints import OLD_STATE


class RefusedCheckpointError(ServiceError):
    """A checkpoint holds more than data, and was not loaded."""


def load_old_state(folder: Path, engine: Any, *, rank: int) -> dict[str, Tensor]:
    """Restore weights and optimizer, and return the random state; a collective.

    Raises `RefusedCheckpointError` for a file that would execute code.
    """
    engine.checkpoint_engine = _DataOnly()
    try:
        with muted_prints(), torch.serialization.safe_globals(_deepspeed_types()):
            loaded, _ = engine.load_checkpoint(str(folder), tag=OLD_STATE)
        if loaded is None:
            raise FileNotFoundError(f"checkpoint {folder} holds no DeepSpeed state")
        return torch.load(folder / f"random-{rank}.pt", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RefusedCheckpointError(
            f"checkpoint {folder} was refused: it holds more than the data that earlier versions of offbeat wrote, and loading "
            f"it could execute code. Move it out of the run's folder to resume from an older one. ({error})"
        ) from error


class _DataOnly:
    """DeepSpeed's reader of files, without the execution of what is in them."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of a file that `torch.save` wrote."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def is_decoupled(self) -> bool:
        """Return that files are read at once."""
        return False


def _deepspeed_types() -> list[Any]:
    """Return the types in DeepSpeed's files; all hold data only."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]
