"""The learner's end of the trackers: hands them rows, and never waits for them.

Each tracker is a process (`learner.reporting.tracker_worker`). A tracker that fails costs its rows, a warning and an
event.
"""

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from offbeat.common.formats import masked, to_toml, without_logins
from offbeat.common.records.row_process import RowProcess
from offbeat.common.records.rows import EvalRow, EventRow, FinalRow, Recorder, Row, SampleRow, StepRow
from offbeat.common.records.run_folder import PROGRAM_LOGS
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import setting_names, setting_value
from offbeat.learner.reporting.tracker_worker import TrackerHealth
from offbeat.learner.reporting.trackers import KINDS, SETTINGS, Kind, Opening

logger = logging.getLogger(__name__)

WORKER = "offbeat.learner.reporting.tracker_worker"


def wanted_trackers(config: Config) -> dict[Kind, str]:
    """Return the trackers that the settings ask for, with the project in each."""
    projects: dict[Kind, str] = {kind: str(setting_value(config, SETTINGS[kind])) for kind in KINDS}
    return {kind: project for kind, project in projects.items() if project}


@contextmanager
def tracking(config: Config, record: Recorder) -> Iterator[Recorder]:
    """Yield what takes the rows of the run to the trackers that the settings ask for; at the end they get `CLOSE_S` together.

    Call this in the main thread: the processes die with the thread that started them. `record` takes an event about a tracker
    that fails.
    """
    processes = [_start(config, kind, project, record) for kind, project in wanted_trackers(config).items()]

    def add(row: Row) -> None:
        # Others, such as one for each group, would only crowd these out of the queue.
        if isinstance(row, StepRow | EvalRow | SampleRow | FinalRow):
            for process in processes:
                process.add(row)

    try:
        yield add
    finally:
        for process in processes:
            process.ask_to_end()
        for process in processes:
            num_dropped = process.close()
            if num_dropped:
                logger.warning("%s: %d rows did not reach the tracker", process.setting, num_dropped)


def settings_to_show(config: Config) -> dict[str, str]:
    """Return the settings as a tracker may show them to others: without those that are none, and without secrets."""
    values = {setting: setting_value(config, setting) for setting in setting_names()}
    return {setting: without_logins(to_toml(masked(value))) for setting, value in values.items() if value is not None}


def _start(config: Config, kind: Kind, project: str, record: Recorder) -> RowProcess:
    setting, folder = SETTINGS[kind], Path(config.run.dir).absolute()
    opening = Opening(kind, project, str(folder), settings_to_show(config))
    log = folder / PROGRAM_LOGS / f"{kind}.log"

    def end(process: subprocess.Popen[bytes]) -> str:
        return f"status {process.wait()}; {log} may say why"

    return RowProcess(
        setting,
        [sys.executable, "-m", WORKER],
        log,
        on_report=partial(_tell, setting, project, record),
        on_end=end,
        beginning=msgspec.json.encode(opening) + b"\n",
    )


def _tell(setting: str, project: str, record: Recorder, line: bytes) -> None:
    """Log that a tracker fails, or that it works again, and record the former."""
    health = msgspec.json.decode(line, type=TrackerHealth)
    if health.problem is None:
        logger.info("%s: the tracker works again; %d rows were lost", setting, health.num_lost)
        return
    detail = f'{setting} = "{project}": {health.problem}'
    logger.warning("%s; training continues", detail)
    record(EventRow(event="tracker_failed", detail=detail))
