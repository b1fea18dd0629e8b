"""The runs of a sweep, which differ in a few settings and in their seeds, made one after another in one folder.

    --set KEY=v1,v2 x --seeds N -> plan.json, one run.toml for each cell -> `offbeat train` -> the report of all

    FOLDER/plan.json
    FOLDER/max_staleness=4/seed=1/run.toml, train.log, and what the run writes

The same command continues a sweep that was stopped. Values and seeds may be added; existing runs are never changed.
"""

import contextlib
import fcntl
import logging
import shlex
import shutil
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
from msgspec.structs import replace

from offbeat.common.config import Config
from offbeat.common.masking import write_private
from offbeat.common.metrics import ROWS_FILE
from offbeat.common.run_folder import CHECKPOINTS, LOG
from offbeat.common.setting_checks import check
from offbeat.common.settings import SettingError, load, resolved_toml
from offbeat.common.shutdown import StopRequest
from offbeat.deploy.launch.launcher import LOOK_S, RestartBudget, Service
from offbeat.deploy.launch.starts import PROGRAM, FreshStarts, ProcessStart
from offbeat.lab.history import RunHistory
from offbeat.lab.report.page import duration
from offbeat.lab.sweep.measures import final_reward
from offbeat.lab.sweep.plan import CONFIG_FILE, PLAN_FILE, Plan, read_plan, read_run, state_of
from offbeat.learner.training import checkpoints
from offbeat.protocols.address_file import address_file
from offbeat.protocols.addresses import is_loopback

logger = logging.getLogger(__name__)

LOG_FILE = "train.log"
"""File in a cell's folder with the output of its run."""

_MAX_DIFFERENCES = 5
"""Number of differences between two sweeps that an error shows."""


class Cell(NamedTuple):
    """One run of a sweep, with its folder and its settings."""

    name: str
    folder: Path
    config: Config


def make_cells(plan: Plan, config_file: Path, overrides: Sequence[str], folder: Path) -> list[Cell]:
    """Return the runs of a plan with their settings checked; raise `SettingError` that names the run with an invalid one."""
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


def check_cells(cells: Sequence[Cell], check_one: Callable[[Config], object]) -> None:
    """Apply a check to the first seed of each value; a `SettingError` that it raises then names the run.

    Other seeds share all that is checked, and each run looks again when it starts.
    """
    for cell in cells:
        if cell.config.run.seed != cells[0].config.run.seed:
            continue
        # Files that a run has already written are no error: a sweep continues it.
        config = replace(cell.config, run=replace(cell.config.run, resume=cell.folder.is_dir()))
        try:
            check_one(config)
        except SettingError as error:
            raise _of_cell(cell.name, error) from error


def prepare(plan: Plan, cells: Sequence[Cell], folder: Path) -> None:
    """Write the plan and the runs' settings into the sweep's folder.

    Raises `SettingError` when the folder holds another sweep: one with runs that this plan lacks or has with other settings.
    """
    if (folder / PLAN_FILE).exists():
        _check_same(read_plan(folder), plan, cells, folder)
    for cell in cells:
        _write_config(cell)
    # Written last: every run that a plan file names has its settings.
    (folder / PLAN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(plan)) + b"\n")


def run_sweep(
    plan: Plan,
    cells: Sequence[Cell],
    folder: Path,
    stop: StopRequest,
    *,
    say: Callable[[str], None],
    write_report: Callable[[], Path],
    program: Sequence[str] = PROGRAM,
) -> int:
    """Run the unfinished cells of a sweep, with a report after each.

    Returns the exit status: 0, 1 when a run failed, 130 when asked to stop.

    Raises `SettingError` when the folder holds another sweep, or another `offbeat sweep` runs in it.
    """
    with alone_in(folder):
        prepare(plan, cells, folder)
        status = _run_cells(cells, stop, say=say, after_each=write_report, program=program)
        logger.info("report: %s", write_report())
    if status:
        logger.info("to continue with the unfinished runs, give the same command with --out %s", folder)
    return status


@contextlib.contextmanager
def alone_in(folder: Path, *, name: str = ".lock") -> Iterator[None]:
    """Lock the folder by a file of this name; raise `SettingError` when another sweep or study has done so."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        _lock(file, folder)
        yield


def _run_cells(
    cells: Sequence[Cell],
    stop: StopRequest,
    *,
    say: Callable[[str], None],
    after_each: Callable[[], object],
    program: Sequence[str],
) -> int:
    """Run the unfinished cells one after another; return the exit status.

    Waits for: the end of each run, looking every `LOOK_S`. A signal is passed on to the run.
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


def render_commands(cells: Sequence[Cell], folder: Path, *, as_job: bool) -> str:
    """Return the commands of the unfinished runs, one per line or as one job array, and log how to make the report."""
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
    # `offbeat train` refuses a folder that holds a run; here nothing is left to resume from, so the rows are deleted first.
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
    """Return the arguments of `offbeat` that start or resume the run."""
    resume = ["run.resume=true"] if _can_resume(cell) else []
    return ["train", str(cell.folder / CONFIG_FILE), *resume]


def _as_cell(config: Config, seed: int, folder: Path) -> Config:
    address = config.hub.address
    if is_loopback(address):
        # A free port for each run: jobs of a cluster may share a machine.
        address = f"{address.rpartition(':')[0]}:0"
    elif (file := address_file(address)) is not None:
        address = f"file:{folder / file.name}"
    mirror = config.run.mirror and f"{config.run.mirror.rstrip('/')}/{folder.name}"
    return replace(
        config,
        run=replace(config.run, dir=str(folder), seed=seed, resume=False, mirror=mirror),
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
            there, here = (tomllib.loads(resolved_toml(config)) for config in (load(file), cell.config))
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
            # The same folder may be written in another way.
            if old.get(key) != new.get(key) and (section, key) != ("run", "dir"):
                yield f"{section}.{key} is {old.get(key)!r} there and {new.get(key)!r} here"


def _write_config(cell: Cell) -> None:
    cell.folder.mkdir(parents=True, exist_ok=True)
    write_private(cell.folder / CONFIG_FILE, resolved_toml(cell.config, with_secrets=True))


def _lock(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        problem = "another sweep or study is running there"
        raise SettingError("--out", str(folder), problem, "Wait for its end, or stop it.") from error


def _can_resume(cell: Cell) -> bool:
    has_log = cell.config.log.enabled and (cell.folder / LOG).is_dir()
    return has_log or checkpoints.newest(cell.folder / CHECKPOINTS) is not None


def _clean(cell: Cell) -> None:
    """Delete the files of a run that cannot be resumed."""
    for path in cell.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (CONFIG_FILE, LOG_FILE):
            path.unlink()


def _run(cell: Cell, stop: StopRequest, program: Sequence[str]) -> int:
    """Run one cell to its end or until a signal; return the exit status."""
    if not _can_resume(cell):
        _clean(cell)
    run = Service(cell.name, RestartBudget(0), FreshStarts(program))
    run.start([ProcessStart(_arguments(cell), {}, cell.folder / LOG_FILE)])
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
    """Return the end of a run in words."""
    if state_of(history) == "finished":
        return "finished"
    if status == 130:
        return f"stopped at step {history.steps[-1].policy_version if history.steps else 0}"
    lines = (cell.folder / LOG_FILE).read_text(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"FAILED with exit status {status} ({said.strip()}; see {cell.folder / LOG_FILE})"
