"""The end of a run, told to people: how it ended, where everything is, and the command that goes on."""

import logging
import shlex
from pathlib import Path

from offbeat.common.logs import doing
from offbeat.common.metrics import ROWS_FILE
from offbeat.common.rows import FinalRow, decode_row
from offbeat.common.run_folder import CHECKPOINTS, CONFIG_FILE, LAUNCH_FILE, has_steps
from offbeat.common.shutdown import StopRequest

logger = logging.getLogger(__name__)

TAIL_BYTES = 1 << 16
"""Bytes at the end of the metrics file in which the final row is looked for."""


def end_run(folder: Path, command: str, stop: StopRequest) -> None:
    """Write the report of the run in `folder` if it has rows, and log the summary.

    `command` is the command that the user gave: `train` or `learner`. A signal ends the writing at once.
    """
    if (folder / ROWS_FILE).exists():
        with stop.at_once(f"the run is kept as it is; its report: offbeat report {_quoted(folder)}"):
            with doing(logger, "writing the report"):
                # Imported now: the statistics behind the report take longer to import than the services to start.
                from offbeat.lab.report.run_report import write_report

                report = write_report(folder)
            logger.info("report: %s", report)
    for line in summary(folder, command):
        logger.info("%s", line)


def summary(folder: Path, command: str) -> list[str]:
    """Return the outcome, the places of what the run left, and how to go on unless it is finished."""
    final = _final_row(folder / ROWS_FILE)
    if final is None:
        lines = ["the run ended without a final row: its learner was killed, or never began"]
    else:
        detail = f" ({final.detail})" if final.detail else ""
        lines = [f"the run {final.outcome} at step {final.policy_version} after {final.wall_s:.0f} s{detail}"]
    checkpoints = sorted(path.name for path in (folder / CHECKPOINTS).glob("step-*") if path.suffix == "")
    found = {
        "model": folder / "model",
        "metrics": folder / ROWS_FILE,
        "rollout log": folder / "log",
        "checkpoints": folder / CHECKPOINTS,
        "program logs": folder / "logs",
    }
    newest = {"checkpoints": f" (newest: {checkpoints[-1]})" if checkpoints else " (none yet)"}
    lines += [f"{name}: {path}{newest.get(name, '')}" for name, path in found.items() if path.exists()]
    if (folder / "log").exists() and has_steps(folder):
        lines.append(f"what the model wrote: offbeat samples {_quoted(folder)}")
    if final is None or final.outcome != "finished":
        lines.append(go_on(folder, command))
    return lines


def go_on(folder: Path, command: str) -> str:
    """Return what a stop now keeps, and the exact command that goes on from there."""
    config = folder / CONFIG_FILE if (folder / CONFIG_FILE).exists() else folder / LAUNCH_FILE
    again = f"offbeat {command} {_quoted(config)}"
    if not has_steps(folder):
        return f"no step was made, so nothing is lost; to start again: {again if config.exists() else 'the same command'}"
    return f"all steps up to the newest checkpoint and all logged groups are kept; to go on: {again} run.resume=true"


def _final_row(rows: Path) -> FinalRow | None:
    """Return the last row of a metrics file if it is the final one."""
    if not rows.exists():
        return None
    with rows.open("rb") as file:
        file.seek(max(0, rows.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    last = decode_row(lines[-1]) if lines else None
    return last if isinstance(last, FinalRow) else None


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
