"""A calibration on disk: a measured noise floor, what it was measured on, and what of that is another thing now."""

import importlib.metadata
from pathlib import Path
from typing import Any

import msgspec
import torch

from offbeat.common.config import Config
from offbeat.common.settings import SettingError
from offbeat.learner.diagnostics.noise_floor import NoiseFloor, NoiseSummary
from offbeat.learner.objectives.bands import ClipBand
from offbeat.protocols.messages import EngineInfo, ModelHashes

FILE = "calibration.json"
"""Its name in the folder of `offbeat calibrate`."""


class LearnerNumerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides the learner's log-probs of given tokens, besides the weights, and what it asks of engines."""

    model: ModelHashes
    dtype: str
    fp32_head: bool
    lora_rank: int
    temperature: float
    device: str
    torch: str
    transformers: str
    engine_options: dict[str, Any]
    """`actor.engine_options`: quantization, the cache's precision, parallelism."""


class EngineNumerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides an engine's."""

    name: str
    version: str
    dtype: str
    device: str


class BandCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a band clips at lag 0: by models fitted to one half of the groups each, of the other half; and measured."""

    name: str
    band: ClipBand
    predicted: float
    """Mean over completions of the share of their tokens that is clipped; all shares here are such."""
    measured: float
    measured_error: float
    """Its standard error, over groups."""
    predicted_below: float
    """Below the band, whatever the sign of the advantage."""
    measured_below: float
    predicted_above: float
    measured_above: float


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that `offbeat calibrate` found."""

    made_at: str
    """Local time."""
    learner: LearnerNumerics
    engine: EngineNumerics
    num_groups: int
    objective: str
    anchor: str
    floor: NoiseFloor
    """Fitted to all groups."""
    summaries: list[NoiseSummary]
    checks: list[BandCheck]
    """Of the objective's own band, the configured one, and the narrowest above the noise; none where nothing is clipped.
    Against engine log-probs, whatever `anchor` is."""
    recommended: ClipBand | None
    """For `objective` and `anchor`."""


def learner_numerics(config: Config, hashes: ModelHashes, device: torch.device) -> LearnerNumerics:
    """Of a learner with this config, on this device."""
    return LearnerNumerics(
        model=hashes,
        dtype=config.model.dtype,
        fp32_head=config.train.fp32_head,
        lora_rank=config.lora.rank,
        temperature=config.rollout.temperature,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        torch=str(torch.__version__),
        transformers=importlib.metadata.version("transformers"),
        engine_options=config.actor.engine_options,
    )


def engine_numerics(engine: EngineInfo) -> EngineNumerics:
    """Of an actor's engine."""
    return EngineNumerics(engine.name, engine.version, engine.dtype, engine.device)


def changes(measured: LearnerNumerics | EngineNumerics, now: LearnerNumerics | EngineNumerics) -> list[str]:
    """What is another thing than it was when the floor was measured, one text for each."""
    before, after = msgspec.structs.asdict(measured), msgspec.structs.asdict(now)
    return [
        f"{name} was {_shown(before[name])}, and is {_shown(after[name])}" for name in before if before[name] != after[name]
    ]


def load_calibration(path: str) -> Calibration:
    """The calibration that `loss.noise_floor` names; `SettingError` when there is none, or it is not one."""
    cure = "Make one with `offbeat calibrate`, or remove the setting."
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except OSError as error:
        raise SettingError("loss.noise_floor", path, f"it cannot be read ({error.strerror})", cure) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SettingError("loss.noise_floor", path, f"it is not a calibration ({error})", cure) from error


def save_calibration(calibration: Calibration, folder: Path) -> Path:
    """Write it; returns the file."""
    path = folder / FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
    return path


def _shown(value: object) -> str:
    return "/".join(msgspec.structs.astuple(value)) if isinstance(value, ModelHashes) else str(value)
