"""The trials of the study, and the files with a row for each trial and for each probe of a gradient."""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from offbeat.common.errors import SettingError
from offbeat.common.settings.objectives import DEFAULTS

ROWS_FILE = "rows.jsonl"
BASELINE = "gspo"
"""The method that all others are compared with, offbeat's first default; `DEFAULT` on tasks without a run of it."""
DEFAULT = "gspo + own length"
LEAST_WIDTH = 1e-3
"""Least width of an interval. Below it, runs differ by the same number of answers, which is chance and no certainty."""
LAGS = (0, 1, 4, 16, 64)
NUM_SEEDS = 5
CORRECTED: Mapping[str, tuple[str, ...]] = {
    "reinforce + token_tis": ("loss.objective=reinforce", "loss.correction=token_tis"),
    "reinforce + sequence_tis": ("loss.objective=reinforce", "loss.correction=sequence_tis"),
    "reinforce + icepop": ("loss.objective=reinforce", "loss.correction=icepop"),
    "reinforce + sequence_mask": ("loss.objective=reinforce", "loss.correction=sequence_mask"),
    "reinforce + sequence_tis + ess rate": (
        "loss.objective=reinforce",
        "loss.correction=sequence_tis(0, 8)",
        "train.on_policy_ess=1",
    ),
    "gspo + ess rate": ("loss.objective=gspo", "train.on_policy_ess=1"),
    "gspo + own length": ("loss.objective=gspo", "loss.clip_by=own_length"),
    "sao + own critic": (
        "loss.objective=sao",
        "rollout.group_size=1",
        "advantage.gae_lambda=by_length",
        "critic.trunk=own",
        "critic.updates_per_step=2",
        "critic.freeze_attention=true",
        "critic.target_lambda=1",
    ),
    "fspo": ("loss.objective=gspo", "loss.function=examples.own_code.own_objective:fspo"),
    "gspo + paper's band": ("loss.objective=gspo", "loss.clip_low=3e-4", "loss.clip_high=4e-4"),
    "gspo + band 0.005": ("loss.objective=gspo", "loss.clip_low=0.005", "loss.clip_high=0.005"),
    "gspo + band 0.02": ("loss.objective=gspo", "loss.clip_low=0.02", "loss.clip_high=0.02"),
    "gspo + band 0.05": ("loss.objective=gspo", "loss.clip_low=0.05", "loss.clip_high=0.05"),
    "gspo + band 0.015": ("loss.objective=gspo", "loss.clip_low=0.015", "loss.clip_high=0.015"),
    "gspo + group anchor": ("loss.objective=gspo", "loss.anchor=group"),
    "gspo + engine routing": ("loss.objective=gspo", "loss.routing_replay=sampled"),
    "grpo + engine routing": ("loss.objective=grpo", "loss.routing_replay=sampled"),
    "grpo + interpolated": ("loss.objective=grpo", "loss.anchor=interpolated", "loss.correction=token_tis"),
}
"""Methods besides the objectives: policy gradients without a ratio of their own, under a weight or a mask of `pi / mu`,
learning rates that go with the effective sample size, other bands and anchors, and the sampler's routing."""
OF_MIXTURES = ("gspo + engine routing", "grpo + engine routing")
"""Methods that only tasks with a mixture of experts can have."""


class StudyTrial(NamedTuple):
    """One run of the study."""

    task: str
    method: str
    """A key of `methods()`."""
    lag: int
    """Optimizer steps between the weights that sample and those that train; fewer at the beginning of the run."""
    noise: float
    """Standard deviation of the noise on the sampler's logits, in nats: 0.01 is about bfloat16's on the quick start."""
    seed: int

    def __str__(self) -> str:
        noise = f", noise {self.noise:g}" if self.noise else ""
        return f"{self.task}: {self.method}, lag {self.lag}{noise}, seed {self.seed}"


class Point(msgspec.Struct, frozen=True, array_like=True):
    """The measurements of one evaluation, and of the steps since the one before."""

    step: int
    """Optimizer steps taken."""
    held_out: float
    """Mean reward of the current weights on held-out prompts, sampled at temperature 1 without noise."""
    reward: float | None = None
    """Mean reward of the completions trained on; None at the first evaluation, before any step, like the numbers below."""
    ess_sequence: float | None = None
    """Smallest `ess/sequence` of a step."""
    ess_token: float | None = None
    """Smallest `ess/token` of a step."""
    clip_fraction: float | None = None
    """Mean of `clip/fraction`."""
    grad_norm: float | None = None
    """Largest `loss/grad_norm` of a step."""
    kl: float | None = None
    """Mean of `kl/behavior_policy_k3`, in nats per token."""
    entropy: float | None = None
    """Mean of `entropy/mean`, in nats per token."""
    length: float | None = None
    """Mean length of the completions trained on, in tokens."""


Row = TypeVar("Row", bound=msgspec.Struct)
Outcome = Literal["finished", "hopeless", "diverged"]
"""`hopeless`: stopped by the rule of `lab.sweep.plan`; `diverged`: the gradient was not finite."""


class StudyRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of one run: a line of `rows.jsonl`."""

    task: str
    method: str
    lag: int
    noise: float
    seed: int
    settings: tuple[str, ...]
    """Settings of the run besides those of the quick start, as `section.key=value`."""
    outcome: Outcome
    num_steps: int
    """Optimizer steps taken."""
    final_reward: float
    """Mean reward of the last weights on all held-out prompts, sampled at temperature 1 without noise."""
    cpu_s: float
    """Processor time of the run, in seconds."""
    points: tuple[Point, ...]

    @property
    def trial(self) -> StudyTrial:
        """The trial that the run belongs to."""
        return StudyTrial(self.task, self.method, self.lag, self.noise, self.seed)


def methods() -> dict[str, tuple[str, ...]]:
    """Return the settings of every method: each objective that there is with its own values, then `CORRECTED`."""
    return {name: (f"loss.objective={name}",) for name in DEFAULTS} | dict(CORRECTED)


def make_trials(
    tasks: Sequence[str], chosen: Sequence[str], lags: Sequence[int], noises: Sequence[float], num_seeds: int
) -> list[StudyTrial]:
    """Return every combination, all of one seed before the next: an unfinished study compares like with like."""
    return [
        StudyTrial(task, method, lag, noise, seed)
        for seed, task, noise, lag, method in itertools.product(range(num_seeds), tasks, noises, lags, chosen)
    ]


def read_rows(folder: Path) -> list[StudyRow]:
    """Return the rows of all files `rows*.jsonl` in the folder, the last one of a trial that has several.

    Raises `SettingError` for a file in the folder's place.
    """
    if folder.is_file():
        raise SettingError("FOLDER", str(folder), "it is a file", "Name a study's folder, or one that is to be made.")
    files = sorted(folder.glob(f"{Path(ROWS_FILE).stem}*.jsonl"))
    rows = {row.trial: row for file in files for row in read_lines(file, StudyRow)}
    return list(rows.values())


def read_lines(file: Path, row_type: type[Row]) -> list[Row]:
    """Return the rows of a file, none where it is missing.

    A last line that a dead process left incomplete is passed over. Raises `SettingError` for a line that is no such row.
    """
    if not file.exists():
        return []
    rows: list[Row] = []
    *lines, _ = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(msgspec.json.decode(line, type=row_type))
        except msgspec.DecodeError as error:
            problem = f"line {number} is no row of this study: {error}"
            raise SettingError("FOLDER", str(file), problem, "Name another folder, or remove the file.") from error
    return rows


def append_row(file: Path, row: msgspec.Struct) -> None:
    """Add a row to the file: whole, and on the disk when this returns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as stream:
        # What follows the last newline was torn when its process died.
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.seek(0, os.SEEK_END)
        stream.write(msgspec.json.encode(row) + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def left_to_do(
    trials: Iterable[StudyTrial], rows: Iterable[StudyRow], settings: Mapping[StudyTrial, tuple[str, ...]]
) -> list[StudyTrial]:
    """Return the trials without a row; raise `SettingError` for a row that was made with other settings."""
    done: set[StudyTrial] = set()
    for row in rows:
        if row.trial in settings and row.settings != settings[row.trial]:
            there, here = (set(one) for one in (row.settings, settings[row.trial]))
            problem = (
                f"{row.trial} was run with {', '.join(sorted(there - here)) or 'less'}, not {', '.join(sorted(here - there))}"
            )
            raise SettingError("FOLDER", row.trial.task, problem, "Name another folder.")
        done.add(row.trial)
    return [trial for trial in trials if trial not in done]


PROBE_FILE = "probe.jsonl"


class ProbeRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One method's gradient at one policy: a line of `probe.jsonl`. `docs.study.probe` has the definitions."""

    task: str
    method: str
    lag: int
    seed: int
    cosine: float | None
    """Cosine of the expected gradient on stale completions with that on fresh ones; None where the batches are too few."""
    variance: float | None
    """Variance of the gradient over the square of its expectation's norm; None where that is not distinguishable from 0."""
    total_variation: float
    """Between pi and mu, over completions; the same for all methods."""
    chi_squared: float
    """Chi-squared divergence of pi from mu over the sampled completions. A few weights may decide it."""
