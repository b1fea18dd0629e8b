"""The end of a run, told to people: its outcome, the places of its files, and the command that goes on."""

import logging
import shlex
from pathlib import Path

from offbeat.common.errors import ServiceError
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import doing
from offbeat.common.records.run_folder import CHECKPOINTS, CONFIG_FILE, LAUNCH_FILE, LOG, MODEL, PROGRAM_LOGS, has_steps
from offbeat.common.records.writer import ROWS_FILE
from offbeat.lab.run_summary import read_end
from offbeat.learner.training import checkpoints

logger = logging.getLogger(__name__)


def end_run(folder: Path, command: str, stop: StopRequest) -> None:
    """Write the report of the run in `folder` if it has rows, and log the summary.

    `command` is the command that the user gave: `train` or `learner`. A signal ends the writing at once.
    """
    if (folder / ROWS_FILE).exists():
        kept = f"the run is kept as it is; its report: offbeat report {_quoted(folder)}"
        with stop.at_once(kept), doing(logger, "writing the report"):
            # Imported now: the statistics behind the report take longer to import than the services to start.
            from offbeat.lab.report.run_report import write_report

            try:
                logger.info("report: %s", write_report(folder))
            except ServiceError as error:
                # The run is over all the same, and its summary is worth more than its report.
                logger.error("%s To write it: offbeat report %s", error, _quoted(folder))
    for line in summary(folder, command):
        logger.info("%s", line)


def summary(folder: Path, command: str) -> list[str]:
    """Return the outcome, the places of the run's files, and how to go on unless the run is finished."""
    ended = read_end(folder)
    if ended is None or ended.outcome is None:
        cut = "its learner was killed, could not start again, or found no room for the row"
        began = "its learner never began, and its log says why" if ended is None else cut
        lines = [f"the run ended without a final row: {began}"]
    else:
        assert ended.wall_s is not None, "it is in the row that the outcome is in"
        detail = f" ({ended.detail})" if ended.detail else ""
        lines = [f"the run {ended.outcome} at step {ended.policy_version} after {ended.wall_s:.0f} s{detail}"]
    checkpoint = checkpoints.newest(folder / CHECKPOINTS)
    found = {
        "model": folder / MODEL,
        "metrics": folder / ROWS_FILE,
        "rollout log": folder / LOG,
        "checkpoints": folder / CHECKPOINTS,
        "program logs": folder / PROGRAM_LOGS,
    }
    newest = {"checkpoints": " (none yet)" if checkpoint is None else f" (newest: {checkpoint.name})"}
    lines += [f"{name}: {path}{newest.get(name, '')}" for name, path in found.items() if path.exists()]
    if (folder / LOG).exists() and has_steps(folder):
        lines.append(f"what the model wrote: offbeat samples {_quoted(folder)}")
    if ended is None or ended.outcome != "finished":
        lines.append(go_on(folder, command))
    return lines


def go_on(folder: Path, command: str) -> str:
    """Return a sentence on what a stop now keeps, with the exact command that goes on from there."""
    config = folder / CONFIG_FILE if (folder / CONFIG_FILE).exists() else folder / LAUNCH_FILE
    again = f"offbeat {command} {_quoted(config)}"
    if not has_steps(folder):
        return f"no step was made, so nothing is lost; to start again: {again if config.exists() else 'the same command'}"
    if checkpoints.newest(folder / CHECKPOINTS) is None:
        kept = "there is no checkpoint (train.checkpoint_interval): the steps are made again from the logged groups"
    else:
        kept = "all steps up to the newest checkpoint and all logged groups are kept"
    return f"{kept}; to go on: {again} run.resume=true"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
