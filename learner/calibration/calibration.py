"""A calibration on disk: a measured noise floor, the learner and engine it was measured on, and what has changed since."""

import importlib.metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.common.errors import SettingError
from offbeat.common.processes.process_table import processor_name
from offbeat.common.settings.config import Config
from offbeat.learner.calibration.bound_noise import BoundCheck, NoiseBySign, independent_completions
from offbeat.learner.calibration.noise_floor import NoiseFloor, NoiseSummary, ProbabilityNoise
from offbeat.learner.objectives.bands import ClipBand
from offbeat.protocols.message_parts import EngineInfo, ModelHashes

FILE = "calibration.json"
"""File name of a calibration in the folder that `offbeat calibrate` writes."""


class LearnerNumerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything besides the weights that determines the learner's log-probs, and the options of its engines."""

    model: ModelHashes
    dtype: str
    fp32_head: bool
    lora_rank: int
    temperature: float
    device: str
    torch: str
    transformers: str
    engine_options: dict[str, Any]
    """`actor.engine_options`, such as quantization, the cache's precision, parallelism."""
    processor: str
    """`common.processes.process_table.processor_name`: it chooses the kernels."""


class EngineNumerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything besides the weights that determines an engine's log-probs."""

    name: str
    version: str
    dtype: str
    device: str
    quantization: str
    """The engine's own numbers of fewer bits than `dtype`; empty for none."""
    processor: str
    """`common.processes.process_table.processor_name`."""


class BandCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The share of tokens that a band clips at lag 0, predicted and measured.

    Predictions are of models fitted to one half of the groups, for the other half. Every share is a mean over completions of
    the share of their tokens.
    """

    name: str
    band: ClipBand
    predicted: float
    measured: float
    measured_error: float
    """Standard error of `measured`, over groups."""
    predicted_below: float
    """Share below the band, at any sign of the advantage."""
    measured_below: float
    predicted_above: float
    measured_above: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of `offbeat calibrate`."""

    made_at: str
    """Local time, `YYYY-MM-DD HH:MM:SS`."""
    learner: LearnerNumerics
    engine: EngineNumerics
    num_groups: int
    objective: str
    anchor: str
    floor: NoiseFloor
    """Fitted to all groups."""
    summaries: list[NoiseSummary]
    by_probability: list[ProbabilityNoise]
    """The noise of tokens by the engine's probability of them."""
    checks: list[BandCheck]
    """Checks of the objective's own band, the configured one, and the narrowest above the noise, against engine log-probs at
    any `anchor`; empty for an objective that does not clip."""
    recommended: ClipBand | None
    """Recommended band for `objective` and `anchor`; None for an objective that does not clip."""
    bounds: tuple[BoundCheck, ...]
    """Checks of each correction and of M2PO's threshold."""
    positive: NoiseFloor
    """Fitted to the completions with an advantage above 0."""
    negative: NoiseFloor
    """Fitted to the completions with an advantage below 0."""
    sign_shares: tuple[float, float]
    """Mean share of a completion's tokens with an advantage above 0, and below 0, of the groups that a step counts."""
    length_quantiles: tuple[int, ...]
    """Evenly spaced quantiles of the completions' lengths, in tokens."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Lengths that stand for those of the calibrated completions."""
        return np.array(self.length_quantiles, dtype=np.int64)

    @property
    def noise(self) -> NoiseBySign:
        """The noise by the sign of the advantage."""
        return NoiseBySign(self.floor, self.positive, self.negative)

    @property
    def num_independent(self) -> float:
        """Number of independent completions that would tell a clipped share as exactly as the calibrated groups do."""
        if not self.checks:
            return self.num_groups
        # The first band, the objective's own, is the narrowest, and its share the best known.
        return independent_completions(
            self.checks[0].measured,
            self.checks[0].measured_error,
            num_groups=self.num_groups,
            num_completions=self.floor.num_completions,
        )


def learner_numerics(config: Config, hashes: ModelHashes, device: torch.device) -> LearnerNumerics:
    """Return the numerics of a learner with this config, on this device."""
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
        processor=processor_name(device.type),
    )


def engine_numerics(engine: EngineInfo) -> EngineNumerics:
    """Return the numerics of an actor's engine."""
    return EngineNumerics(engine.name, engine.version, engine.dtype, engine.device, engine.quantization, engine.processor)


def changes(measured: LearnerNumerics | EngineNumerics, now: LearnerNumerics | EngineNumerics) -> list[str]:
    """Return a sentence for each property that has changed since the floor was measured."""
    before, after = msgspec.structs.asdict(measured), msgspec.structs.asdict(now)
    return [
        f"{name} was {_shown(before[name])}, and is {_shown(after[name])}" for name in before if before[name] != after[name]
    ]


def load_calibration(path: str) -> Calibration:
    """Read the calibration that `loss.noise_floor` names. Raises `SettingError` if the file is missing or not a calibration."""
    cure = "Make one with `offbeat calibrate`, or remove the setting."
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except OSError as error:
        raise SettingError("loss.noise_floor", path, f"it cannot be read ({error.strerror})", cure) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SettingError("loss.noise_floor", path, f"it is not a calibration ({error})", cure) from error


def save_calibration(calibration: Calibration, folder: Path) -> Path:
    """Write the calibration into a folder; return the file."""
    path = folder / FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
    return path


def _shown(value: object) -> str:
    return "/".join(msgspec.structs.astuple(value)) if isinstance(value, ModelHashes) else str(value)
