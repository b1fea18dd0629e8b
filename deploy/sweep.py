"""A sweep: runs that differ in a few settings and in their seeds, one after another, in one folder.

    --set KEY=v1,v2 x --seeds N -> plan.json, one run.toml for each cell -> `offbeat train` -> the report of all

    FOLDER/plan.json
    FOLDER/max_staleness=4/seed=1/run.toml, train.log, and what the run writes

The same command goes on where it stopped. A sweep may grow by values and seeds; what is there is never changed by it.
"""

import contextlib
import fcntl
import itertools
import logging
import re
import shlex
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from common.config import Config
from common.metrics import ROWS_FILE, read_rows
from common.setting_checks import check
from common.settings import SettingError, full_name, load, resolved_toml
from common.shutdown import StopRequest
from lab.history import RunHistory, fold_rows
from deploy.launch.launcher import LOOK_S, PROGRAM, Command, RestartBudget, Service
from lab.report.page import duration
from lab.sweep.measures import final_reward
from learner.training import checkpoints
from protocols.channels import is_loopback

logger = logging.getLogger(__name__)

PLAN_FILE = "plan.json"
CONFIG_FILE = "run.toml"
"""The settings of a cell, all of them, in its folder."""
LOG_FILE = "train.log"
"""What the cell's run said."""

_NOT_SWEPT = {
    "run.seed": "Use --seeds, which counts up from run.seed.",
    "run.dir": "Use --out: each run gets a folder in it.",
    "run.resume": "What broke off is resumed by itself.",
}
_MAX_DIFFERENCES = 5
"""More are not shown."""


class Planned(NamedTuple):
    """One run of a plan."""

    values: tuple[str, ...]
    """Of the settings that are varied, in their order, as the user wrote them."""
    seed: int
    name: str
    """Its folder, below the sweep's: `max_staleness=4/seed=1`."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is varied: `plan.json`."""

    settings: dict[str, list[str]]
    """The values of each setting (`section.key`), as the user wrote them."""
    seeds: list[int]
    """Values of `run.seed`."""

    @property
    def keys(self) -> list[str]:
        """What the settings are called in names: the bare key where only one section has it."""
        return [_short(setting) for setting in self.settings]

    @property
    def combinations(self) -> list[tuple[str, ...]]:
        """The product of all values, the last setting's changing fastest."""
        return list(itertools.product(*self.settings.values()))

    @property
    def cells(self) -> list[Planned]:
        """All runs in their order: a seed of every combination before the next seed, so that a sweep that is not done yet
        compares like with like, and what changes on the machine meanwhile falls on all of them."""
        keys = self.keys
        return [
            Planned(values, seed, "/".join((*map(_folder_name, keys, values), f"seed={seed}")))
            for seed in self.seeds
            for values in self.combinations
        ]


class Cell(NamedTuple):
    """One run of a sweep."""

    name: str
    folder: Path
    config: Config


State = Literal["new", "broken off", "finished"]


def make_plan(settings: Sequence[str], *, num_seeds: int, first_seed: int) -> Plan:
    """The plan of `KEY=v1,v2,...` and seeds; raises `SettingError`."""
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
    names = Counter(cell.name for cell in plan.cells)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise SettingError("--set", list(settings), f"two of its runs are {twice}", "Give each value once.")
    return plan


def split_values(listed: str) -> list[str]:
    """The parts between commas; those in brackets and quotes belong to a value: `[0.9,0.95],[0.8,0.9]` are two."""
    parts, depth, quote = [""], 0, ""
    for character in listed:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def make_cells(plan: Plan, config_file: Path, overrides: Sequence[str], folder: Path) -> list[Cell]:
    """The runs of a plan, with their settings checked; `SettingError` names the run that has an impossible one."""
    cells: list[Cell] = []
    warnings: dict[str, None] = {}
    for planned in plan.cells:
        swept = [f"{setting}={value}" for setting, value in zip(plan.settings, planned.values, strict=True)]
        try:
            config = load(config_file, [*overrides, *swept])
            config = _as_cell(config, planned.seed, folder / planned.name)
            warnings |= dict.fromkeys(check(config))
        except SettingError as error:
            raise _of_cell(planned.name, error) from error
        cells.append(Cell(planned.name, folder / planned.name, config))
    for warning in warnings:
        logger.warning(warning)
    return cells


def check_cells(cells: Sequence[Cell], check_one: Callable[[Config], None]) -> None:
    """Apply a check that raises `SettingError` to the settings of each run; the error then names the run."""
    for cell in cells:
        # What a run has written already is no obstacle: a sweep goes on with it.
        config = replace(cell.config, run=replace(cell.config.run, resume=cell.folder.is_dir()))
        try:
            check_one(config)
        except SettingError as error:
            raise _of_cell(cell.name, error) from error


def prepare(plan: Plan, cells: Sequence[Cell], folder: Path) -> None:
    """Write the plan and the runs' settings into the sweep's folder.

    `SettingError` when it holds another sweep: one that has runs which this plan has not, or has with other settings.
    """
    if (folder / PLAN_FILE).exists():
        _check_same(read_plan(folder), plan, cells, folder)
    for cell in cells:
        _write_config(cell)
    # Last: runs that the plan names have their settings.
    (folder / PLAN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(plan)) + b"\n")


def read_plan(folder: Path) -> Plan:
    """The plan of a sweep's folder; `SettingError` when it has none."""
    try:
        return msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=Plan)
    except FileNotFoundError as error:
        raise SettingError("--out", str(folder), f"it has no {PLAN_FILE}", "Name the folder of a sweep.") from error
    except msgspec.DecodeError as error:
        raise SettingError("--out", str(folder), f"its {PLAN_FILE} is damaged: {error}", "Name another folder.") from error


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of the folder meanwhile; `SettingError` when one is at work there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        _lock(file, folder)
        yield


def read_run(folder: Path) -> RunHistory:
    """What the rows of a run tell; empty before its first one."""
    rows_file = folder / ROWS_FILE
    return fold_rows(read_rows(rows_file)) if rows_file.exists() else RunHistory()


def state_of(history: RunHistory) -> State:
    """Whether a run is done, or begun."""
    if history.final is not None and history.final.get("outcome") == "finished":
        return "finished"
    return "broken off" if history.num_rows else "new"


def run_cells(
    cells: Sequence[Cell],
    stop: StopRequest,
    *,
    say: Callable[[str], None],
    after_each: Callable[[], object],
    program: Sequence[str] = PROGRAM,
) -> int:
    """Run what is not finished, one after another; the exit status: 0, 1 when a run failed, 130 when asked to stop.

    Waits for: the end of each run, looking every `LOOK_S`. A signal is passed on to it.
    """
    todo = [cell for cell in cells if state_of(read_run(cell.folder)) != "finished"]
    if len(todo) < len(cells):
        say(f"{len(cells) - len(todo)}/{len(cells)} runs are finished already")
    num_failed, began = 0, time.monotonic()
    for index, cell in enumerate(todo):
        if stop:
            break
        started = time.monotonic()
        status = _run(cell, stop, program)
        history = read_run(cell.folder)
        outcome = _outcome(cell, history, status)
        is_failed = state_of(history) != "finished" and not stop
        num_failed += is_failed
        reward = final_reward(history)
        parts = [outcome, *([] if reward is None else [f"reward {reward:.3g}"]), duration(time.monotonic() - started)]
        num_left = len(todo) - index - 1
        left = f"; about {duration((time.monotonic() - began) / (index + 1) * num_left)} left" if num_left and not stop else ""
        place = len(cells) - num_left
        say(f"{place}/{len(cells)} {cell.name.replace('/', ' ')}: {', '.join(parts)}{left}")
        after_each()
    return 130 if stop else 1 if num_failed else 0


def show_commands(cells: Sequence[Cell], folder: Path, *, as_job: bool) -> str:
    """The commands of the runs that are not finished, a line each, or as one job array; with a word on what follows."""
    todo = [cell for cell in cells if state_of(read_run(cell.folder)) != "finished"]
    logger.info(
        "%d of %d runs are to be done; when they are: offbeat sweep --report --out %s",
        len(todo),
        len(cells),
        shlex.quote(str(folder)),
    )
    lines = [_shell_line(cell) for cell in todo]
    return _slurm_script(lines, folder) if as_job and lines else "\n".join(lines)


def _shell_line(cell: Cell) -> str:
    command = shlex.join(["offbeat", *_arguments(cell)])
    rows_file = cell.folder / ROWS_FILE
    # `offbeat train` leaves alone what holds a run already; here there is nothing to go on from.
    return f"rm {shlex.quote(str(rows_file))} && {command}" if rows_file.exists() and not _can_resume(cell) else command


def _slurm_script(lines: Sequence[str], folder: Path) -> str:
    commands = "\n".join(f"  {shlex.quote(line)}" for line in lines)
    return f"""#!/bin/bash
#SBATCH --job-name=offbeat-sweep
#SBATCH --array=0-{len(lines) - 1}
#SBATCH --output={folder}/slurm-%a.log
# Add what your cluster needs: --partition, --time, --gres, --cpus-per-task, --mem.
commands=(
{commands}
)
eval "${{commands[$SLURM_ARRAY_TASK_ID]}}"
"""


def _arguments(cell: Cell) -> list[str]:
    """What follows `offbeat` to begin the run, or to go on with it."""
    resume = ["run.resume=true"] if _can_resume(cell) else []
    return ["train", str(cell.folder / CONFIG_FILE), *resume]


def _short(setting: str) -> str:
    key = setting.partition(".")[2]
    try:
        return key if full_name(key) == setting else setting
    except SettingError:
        return setting


def _folder_name(key: str, value: str) -> str:
    """`key=value` without what has a meaning in paths and shells."""
    plain = re.sub(r"[^\w.,:+-]+", "_", value)
    return f"{key}={plain}"


def _as_cell(config: Config, seed: int, folder: Path) -> Config:
    address = config.hub.address
    if is_loopback(address):
        # Any free port: jobs of a cluster may share a machine.
        address = f"{address.rpartition(':')[0]}:0"
    return replace(
        config,
        run=replace(config.run, dir=str(folder), seed=seed, resume=False),
        hub=replace(config.hub, address=address),
    )


def _of_cell(name: str, error: SettingError) -> SettingError:
    return SettingError("run of the sweep", name, str(error).removesuffix("."), "Nothing was started.")


def _check_same(old: Plan, new: Plan, cells: Sequence[Cell], folder: Path) -> None:
    missing = {cell.name for cell in old.cells} - {cell.name for cell in new.cells}
    differences: dict[str, None] = {}
    if missing:
        differences = dict.fromkeys(_plan_differences(old, new))
    for cell in cells:
        file = cell.folder / CONFIG_FILE
        if cell.name in {planned.name for planned in old.cells} and file.exists():
            there, here = tomllib.loads(file.read_text()), tomllib.loads(resolved_toml(cell.config))
            differences |= dict.fromkeys(_config_differences(there, here))
    if differences:
        shown = [*differences][:_MAX_DIFFERENCES]
        more = f"; and {len(differences) - len(shown)} more" if len(differences) > len(shown) else ""
        raise SettingError(
            "--out",
            str(folder),
            f"it holds another sweep: {'; '.join(shown)}{more}",
            "Give the same settings (values and seeds may be added), or another folder.",
        )


def _plan_differences(old: Plan, new: Plan) -> Iterator[str]:
    for setting in {**old.settings, **new.settings}:
        there, here = (plan.settings.get(setting) for plan in (old, new))
        if there is None or here is None or not set(there) <= set(here):
            yield f"{setting} is {_listed(there)} there and {_listed(here)} here"
    if not set(old.seeds) <= set(new.seeds):
        yield f"run.seed is {_listed(map(str, old.seeds))} there and {_listed(map(str, new.seeds))} here"
    if list(old.settings) != list(new.settings):
        yield f"the settings are varied in the order {_listed(old.settings)} there and {_listed(new.settings)} here"


def _listed(values: Iterable[str] | None) -> str:
    return "not varied" if values is None else ", ".join(values)


def _config_differences(there: Mapping[str, Mapping], here: Mapping[str, Mapping]) -> Iterator[str]:
    for section in {**there, **here}:
        old, new = there.get(section, {}), here.get(section, {})
        for key in {**old, **new}:
            # The same folder may be named in another way.
            if old.get(key) != new.get(key) and (section, key) != ("run", "dir"):
                yield f"{section}.{key} is {old.get(key)!r} there and {new.get(key)!r} here"


def _write_config(cell: Cell) -> None:
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / CONFIG_FILE).write_text(resolved_toml(cell.config))


def _lock(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SettingError("--out", str(folder), "another sweep is at work there", "Wait for its end, or stop it.") from error


def _can_resume(cell: Cell) -> bool:
    has_log = cell.config.log.enabled and (cell.folder / "log").is_dir()
    return has_log or checkpoints.newest(cell.folder / "checkpoints") is not None


def _clean(cell: Cell) -> None:
    """Take away what a run left that cannot go on."""
    for path in cell.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (CONFIG_FILE, LOG_FILE):
            path.unlink()


def _run(cell: Cell, stop: StopRequest, program: Sequence[str]) -> int:
    """Run one cell to its end, or until a signal; the exit status."""
    if not _can_resume(cell):
        _clean(cell)
    run = Service(cell.name, RestartBudget(0), list(program))
    run.start([Command(_arguments(cell), {}, cell.folder / LOG_FILE)])
    is_asked = False
    try:
        while (status := run.status) is None:
            if stop and not is_asked:
                logger.info("%s: asking %s to stop (again: end at once)", stop.reason, cell.name)
                run.ask_to_stop()
                is_asked = True
            time.sleep(LOOK_S)
        return status
    finally:
        run.kill()


def _outcome(cell: Cell, history: RunHistory, status: int) -> str:
    """How the run ended, in words."""
    if state_of(history) == "finished":
        return "finished"
    if status == 130:
        return f"stopped at step {history.steps[-1]['policy_version'] if history.steps else 0}"
    lines = (cell.folder / LOG_FILE).read_text(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"FAILED with exit status {status} ({said.strip()}; see {cell.folder / LOG_FILE})"
