"""The plan of a sweep: the settings that it varies, its trials, and the rule by which a trial is stopped as hopeless.

A run is hopeless when, after long enough, it is worse than the model was before the first step.
"""

import itertools
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from offbeat.common.errors import SettingError
from offbeat.common.formats import split_values
from offbeat.common.processes.files import replace
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.common.settings.loading import full_name
from offbeat.lab.history import RunHistory, fold_rows
from offbeat.lab.sweep.estimates import Curve

PLAN_FILE = "plan.json"
CONFIG_FILE = "run.toml"
"""The file with all settings of a run, in its folder."""
_NOT_SWEPT = {
    "run.seed": "Use --seeds, which counts up from run.seed.",
    "run.dir": "Use --out: each run gets a folder in it.",
    "run.resume": "What broke off is resumed by itself.",
}
MAX_NAME_BYTES = 255
"""Longest name of a folder, in bytes of UTF-8."""
State = Literal["new", "broken off", "finished", "hopeless"]
"""`hopeless`: stopped by the rule of `why_hopeless`."""
ENDED: tuple[State, ...] = ("finished", "hopeless")
"""States of runs for which nothing is left to do."""
Values = tuple[str, ...]
"""Values of the varied settings, in the plan's order, as the user wrote them."""


class PlannedTrial(NamedTuple):
    """One run of a plan."""

    values: Values
    seed: int
    name: str
    """Folder of the run below the sweep's: `max_staleness=4/seed=1`."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `plan.json`."""

    settings: dict[str, list[str]]
    """The values of each setting (`section.key`), as the user wrote them."""
    seeds: list[int]
    """Values of `run.seed`."""

    @property
    def keys(self) -> list[str]:
        """Short names of the settings: the bare key where only one section has it."""
        return [_short(setting) for setting in self.settings]

    @property
    def combinations(self) -> list[Values]:
        """Every combination of values, the last setting's changing fastest."""
        return list(itertools.product(*self.settings.values()))

    @property
    def trials(self) -> list[PlannedTrial]:
        """All runs in their order: every combination with one seed before the next seed.

        So an unfinished sweep compares like with like, and changes of the machine's speed affect all combinations alike.
        """
        keys = self.keys
        return [
            PlannedTrial(values, seed, "/".join((*map(_folder_name, keys, values), f"seed={seed}")))
            for seed in self.seeds
            for values in self.combinations
        ]


def make_plan(settings: Sequence[str], *, num_seeds: int, first_seed: int) -> Plan:
    """Return the plan for settings `KEY=v1,v2,...` and seeds counted from `first_seed`. Raise `SettingError` for a bad one."""
    values: dict[str, list[str]] = {}
    for text in settings:
        key, equals, listed = text.partition("=")
        setting = full_name(key.strip())
        if setting in _NOT_SWEPT:
            raise SettingError("--set", text, "a sweep sets this itself", _NOT_SWEPT[setting])
        if setting in values:
            raise SettingError("--set", text, f"{setting} is given twice", "Give all its values at once: KEY=v1,v2.")
        values[setting] = split_values(listed)
        if not equals or "" in values[setting]:
            raise SettingError("--set", text, "a value is missing", "Write KEY=v1,v2, for example max_staleness=0,4.")
    if not values:
        raise SettingError("--set", "", "nothing is varied", "Write --set KEY=v1,v2, for example --set max_staleness=0,4.")
    plan = Plan(values, list(range(first_seed, first_seed + num_seeds)))
    names = Counter(trial.name for trial in plan.trials)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise SettingError("--set", list(settings), f"two of its runs are {twice}", "Give each value once.")
    return plan


def read_plan(folder: Path) -> Plan:
    """Return the plan in a sweep's folder. `SettingError` when there is none, or it is damaged."""
    try:
        return msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=Plan)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SettingError("--out", str(folder), f"it has no {PLAN_FILE}", "Name the folder of a sweep.") from error
    except msgspec.DecodeError as error:
        raise SettingError("--out", str(folder), f"its {PLAN_FILE} is damaged: {error}", "Name another folder.") from error


def read_run(folder: Path) -> RunHistory:
    """Return the history of the run in a folder; empty before its first row."""
    return fold_rows(read_rows(folder / ROWS_FILE))


def state_of(folder: Path, history: RunHistory) -> State:
    """Return the state of the run in a folder, with this history."""
    if history.final is not None and history.final.outcome == "finished":
        return "finished"
    if read_hopeless(folder) is not None:
        return "hopeless"
    return "broken off" if history.num_rows else "new"


def read_baseline(plan: Plan, texts: Sequence[str]) -> dict[str, str]:
    """Return the settings of `KEY=VALUE` texts; raise `SettingError` for one that the plan does not vary, or not so."""
    chosen: dict[str, str] = {}
    for text in texts:
        key, _, value = (part.strip() for part in text.partition("="))
        setting = full_name(key)
        known = plan.settings.get(setting)
        if known is None:
            cure = f"Take one of {', '.join(plan.settings)}."
            raise SettingError("--baseline", text, "the sweep does not vary this setting", cure)
        if value not in known:
            raise SettingError("--baseline", text, "the sweep has no such value", f"Take one of {', '.join(known)}.")
        chosen[setting] = value
    return chosen


def find_baselines(plan: Plan, chosen: Mapping[str, str]) -> dict[Values, Values]:
    """Return the baseline of each combination: the one with the chosen settings, and all others alike."""
    return {
        values: tuple(chosen.get(setting, value) for setting, value in zip(plan.settings, values, strict=True))
        for values in plan.combinations
    }


def _short(setting: str) -> str:
    key = setting.partition(".")[2]
    try:
        return key if full_name(key) == setting else setting
    except SettingError:
        return setting


def _folder_name(key: str, value: str) -> str:
    """Return `key=value`, with an underscore for characters that mean something in paths and shells.

    Of a value such as a long prompt, the name has the beginning and a checksum: file systems limit names to `MAX_NAME_BYTES`.
    """
    plain = re.sub(r"[^\w.,:+-]+", "_", value)
    name = f"{key}={plain}".encode()
    if len(name) <= MAX_NAME_BYTES:
        return name.decode()
    checksum = f"-{zlib.crc32(value.encode()):08x}"
    return name[: MAX_NAME_BYTES - len(checksum)].decode(errors="ignore") + checksum


# Hopeless trials

HOPELESS_AFTER = 40
"""Steps, beside the lag, from which on a run may be hopeless."""
HOPELESS_WINDOW = 4
"""Evaluations in a row whose mean reward is below the one before the first step, less `HOPELESS_MARGIN`."""
HOPELESS_MARGIN = 0.05
HOPELESS_NUM_STEPS = 5
"""Steps whose mean reward stands for an evaluation, in a run without evaluations."""
HOPELESS_FILE = "hopeless.json"
"""File in the folder of a run that was stopped by the rule, with the reason."""


class Hopeless(msgspec.Struct, frozen=True):
    """The reason why a run is hopeless."""

    step: int
    """Optimizer steps taken."""
    reward: float
    """Mean of the last `HOPELESS_WINDOW` evaluations."""
    first_reward: float
    """The evaluation before the first step."""

    def __str__(self) -> str:
        return f"reward {self.reward:.3g} at step {self.step}, {self.first_reward:.3g} before the first"


def why_hopeless(rewards: Curve, *, lag: int) -> Hopeless | None:
    """Return the reason why a run with these evaluations over steps is hopeless; None for one that is not, or not yet.

    `lag` is the number of steps after which the rollouts of the first weights are used up. Without an evaluation before the
    first step nothing can be said.
    """
    if len(rewards.xs) <= HOPELESS_WINDOW or rewards.xs[0] > 0 or rewards.xs[-1] < HOPELESS_AFTER + lag:
        return None
    recent = statistics.fmean(rewards.ys[-HOPELESS_WINDOW:])
    if recent >= rewards.ys[0] - HOPELESS_MARGIN:
        return None
    return Hopeless(int(rewards.xs[-1]), recent, rewards.ys[0])


def evaluations_of(history: RunHistory) -> Curve:
    """Return the reward of a run's evaluations over steps.

    In a run without evaluations the reward of the first step, whose rollouts are of the first weights, stands for the one
    before it, and the means of `HOPELESS_NUM_STEPS` steps each for the others.
    """
    if known := history.held_out_rewards:
        return Curve([float(version) for version in known], [*known.values()])
    steps = [(row.policy_version, reward) for row in history.steps if (reward := row.number("reward/mean")) is not None]
    if not steps:
        return Curve([], [])
    blocks = [steps[end - HOPELESS_NUM_STEPS : end] for end in range(HOPELESS_NUM_STEPS, len(steps) + 1, HOPELESS_NUM_STEPS)]
    first_version, first_reward = steps[0]
    return Curve(
        [first_version - 1.0, *(float(block[-1][0]) for block in blocks)],
        [first_reward, *(statistics.fmean(reward for _, reward in block) for block in blocks)],
    )


def mark_hopeless(folder: Path, reason: Hopeless) -> None:
    """Write the reason into a run's folder: from now on the run counts as ended."""
    replace(folder / HOPELESS_FILE, msgspec.json.encode(reason) + b"\n")


def read_hopeless(folder: Path) -> Hopeless | None:
    """Return the reason why the run in a folder was stopped; None for a run that was not stopped by the rule."""
    try:
        return msgspec.json.decode((folder / HOPELESS_FILE).read_bytes(), type=Hopeless)
    except FileNotFoundError:
        return None
