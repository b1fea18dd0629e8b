"""How well one calibration of 128 groups predicts the clip fraction at lag 0 of other groups.

    python -m tests.benchmarks.calibration collect OUT --model quickstart --dtype bfloat16 --seed 0    # 2 minutes
    python -m tests.benchmarks.calibration judge OUT

`collect` samples 640 groups of the initial weights by `offbeat calibrate`; each 128 of them are a calibration of their own,
with prompts and random draws that no other has. `judge` reads all runs in OUT. For each model and precision it fits every
calibration, and compares its prediction with what the band clips of all other groups:

    by sign     the noise of A > 0 and of A < 0 apart, as `offbeat calibrate` predicts
    alike       the noise of all completions, at either sign
    in 95%      calibrations whose printed interval, measured +- 1.96 standard errors, holds the share of the other groups
    alarms      first steps of 32 groups of which a run would say that the calibration before them mispredicts them
"""

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from offbeat.common.processes.environment import prepare_environment
from offbeat.common.processes.process_table import processor_name
from offbeat.common.records.rows import StepRow
from offbeat.common.records.run_folder import CONFIG_FILE
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.common.settings.loading import load
from offbeat.deploy.local.quickstart.prepared import Recipe, ensure, prepared_folder
from offbeat.deploy.local.quickstart.tiny_tasks import Reversal
from offbeat.lab.calibration import HALF_WIDTH, load_groups
from offbeat.learner.calibration.bound_noise import (
    NoiseBySign,
    allowed_difference,
    fit_by_sign,
    group_error,
    independent_completions,
)
from offbeat.learner.calibration.noise_floor import Differences
from offbeat.learner.objectives.bands import ClipBand
from tests.benchmarks.measuring import print_table

NUM_GROUPS, GROUPS_EACH, GROUPS_PER_STEP = 640, 128, 32
BANDS = (ClipBand(3e-4, 4e-4, is_sequence_ratio=True), ClipBand(2e-3, 2e-3, is_sequence_ratio=True))
"""GSPO's own band first, which `collect` trains with."""
PROMISE = 0.05
MIXTURE = Recipe(Reversal(), architecture="qwen3_moe")
CONFIGS = {"quickstart": None, "mixture": None, "lookup": "examples/lookup/run.toml"}


class Calibrated(NamedTuple):
    """One calibration of `GROUPS_EACH` groups."""

    groups: Differences
    noise: NoiseBySign

    def predict(self, band: ClipBand, others: Differences, *, by_sign: bool = True) -> float:
        noise = self.noise if by_sign else NoiseBySign(*[self.noise.every] * 3)
        return float(noise.expected_clip(band, others.lengths, others.positive, others.negative).mean())


class Judgment(NamedTuple):
    """What one calibration predicts and measures, and the share of all other groups."""

    by_sign: float
    alike: float
    measured: float
    error: float
    of_others: float
    is_alarm: bool


def collect(out: Path, model: str, dtype: str, seed: int) -> None:
    """Sample the groups of one run."""
    settings = [f"model.dtype={dtype}", f"run.seed={seed}", *_own_band()]
    if model == "mixture":
        folder = prepared_folder(MIXTURE)
        ensure(folder, MIXTURE)
        settings += [
            f"model.path={folder}/model",
            f"data.train_data={folder}/train.jsonl",
            f"data.eval_data={folder}/eval.jsonl",
        ]
    config = CONFIGS[model]
    command = [sys.executable, "-m", "offbeat.deploy.cli.main", "calibrate", *([config] if config else []), *settings]
    folder = out / f"{model}-{dtype}-{seed}"
    subprocess.run([*command, "--groups", str(NUM_GROUPS), "--out", str(folder)], check=True)


def judge(out: Path) -> None:
    """Print what the calibrations of all runs in `out` are worth."""
    kinds: dict[str, list[Path]] = defaultdict(list)
    for run in sorted(path.parent for path in out.glob(f"*/{CONFIG_FILE}")):
        kinds[run.name.rpartition("-")[0]].append(run)
    lines = [line for kind, runs in kinds.items() for line in _judge_kind(kind, runs)]
    header = ("model", "band", "calibrations", "clipped", "by sign", "within 0.05", "alike", "within 0.05", "in 95%", "alarms")
    print_table(f"Predicted clip fractions, on {processor_name('cpu')}", header, lines)


def _judge_kind(kind: str, runs: Sequence[Path]) -> list[list[str]]:
    scored = [part for run in runs for part in _score(run)]
    calibrated = [Calibrated(part, fit_by_sign(part)) for part in scored]
    lines: list[list[str]] = []
    for band in BANDS:
        found = [_judge_one(calibrated, index, band) for index in range(len(calibrated))]
        errors = [np.array([getattr(one, name) - one.of_others for one in found]) for name in ("by_sign", "alike")]
        measured = np.array([(one.measured - one.of_others, one.error) for one in found])
        held = np.abs(measured[:, 0]) <= HALF_WIDTH * measured[:, 1]
        of_models = [
            [f"{error.mean():+.3f}, at most {np.abs(error).max():.3f}", _count(np.abs(error) <= PROMISE)] for error in errors
        ]
        shares = f"{np.mean([one.of_others for one in found]):.1%} ± {measured[:, 0].std():.1%}"
        alarms = _count(np.array([one.is_alarm for one in found]))
        lines.append([kind, f"{band.low:g}", str(len(found)), shares, *of_models[0], *of_models[1], _count(held), alarms])
    return lines


def _judge_one(calibrated: Sequence[Calibrated], index: int, band: ClipBand) -> Judgment:
    one = calibrated[index]
    clipped = one.groups.clipped(band)
    measured, error = float(clipped.mean()), group_error(clipped, one.groups)
    others = Differences.join([other.groups for place, other in enumerate(calibrated) if place != index])
    own = one.groups.clipped(BANDS[0])
    independent = independent_completions(
        float(own.mean()), group_error(own, one.groups), num_groups=GROUPS_EACH, num_completions=len(own)
    )
    # The first groups of the next calibration are the first step of a run with this one's noise floor.
    step = calibrated[(index + 1) % len(calibrated)].groups
    step = step.take(step.groups < GROUPS_PER_STEP)
    predicted = one.predict(band, step)
    of_step = len(step.lengths) * independent / len(own)
    allowed = allowed_difference(predicted, calibrated=independent, measured=of_step)
    return Judgment(
        by_sign=one.predict(band, one.groups),
        alike=one.predict(band, one.groups, by_sign=False),
        measured=measured,
        error=error,
        of_others=float(others.clipped(band).mean()),
        is_alarm=abs(float(step.clipped(band).mean()) - predicted) > allowed,
    )


def _score(run: Path) -> list[Differences]:
    """Return the calibrations of one run, and compare their clip fraction with that of the run's own step."""
    from offbeat.learner.training.trainer import Trainer

    config = load(run / CONFIG_FILE)
    trainer = Trainer(replace(config, loss=replace(config.loss, noise_floor="")))
    groups = load_groups(run)
    parts = [trainer.compare(groups[start : start + GROUPS_EACH]) for start in range(0, len(groups), GROUPS_EACH)]
    trainer.close()
    (step,) = (row for row in read_rows(run / ROWS_FILE) if isinstance(row, StepRow))
    every = Differences.join(parts)
    clipped = every.clipped(BANDS[0]).mean()
    by_sign = [float(every.log_sequence_ratios[share > 0].mean()) for share in (every.positive, every.negative)]
    measured = step.measured("clip/fraction")
    print(f"{run.name}: clip/fraction of the run's own step {measured:.4f}, scored again {clipped:.4f}; mean log s", end="")
    print(f" {by_sign[0]:+.1e} where A > 0, {by_sign[1]:+.1e} where A < 0")
    return parts


def _count(held: np.ndarray) -> str:
    return f"{held.sum()} of {len(held)}"


def _own_band() -> list[str]:
    return [f"loss.clip_low={BANDS[0].low}", f"loss.clip_high={BANDS[0].high}"]


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("collect", "judge"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=CONFIGS, default="quickstart")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare_environment()
    if arguments.command == "collect":
        collect(arguments.out, arguments.model, arguments.dtype, arguments.seed)
        return
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    judge(arguments.out)


if __name__ == "__main__":
    main()
