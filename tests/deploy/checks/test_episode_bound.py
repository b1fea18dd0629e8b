"""The bound is compared with the length of episodes before a run, and with that of its groups when it is resumed."""

from pathlib import Path

from offbeat.common.records.rows import StepRow, encode_row
from offbeat.common.records.writer import ROWS_FILE
from offbeat.common.settings.loading import load
from offbeat.deploy.checks.findings import Finding
from offbeat.deploy.checks.preflight import check_episodes

METRICS = {"time/step_s": 2.0, "time/wait_rollouts_s": 1.0, "time/held_back_s": 1.0, "staleness/bound": 3}


def findings(folder: Path, *settings: str) -> list[Finding]:
    return list(check_episodes(load(None, [f"run.dir={folder}", "staleness.max_staleness=3", *settings])))


def write_steps(folder: Path, group_s: float) -> None:
    steps = [StepRow(policy_version=step, metrics={**METRICS, "group/seconds_mean": group_s}) for step in range(20)]
    (folder / ROWS_FILE).write_bytes(b"".join(encode_row(step) + b"\n" for step in steps))


def test_note_says_for_which_steps_the_bound_is_too_small(tmp_path: Path) -> None:
    (note,) = findings(tmp_path, "task.environment=games:play", "environment.episode_timeout_s=120")
    assert note.kind == "note"
    assert "may take 120 s" in note.text
    assert "unless its steps take 30 s" in note.text
    assert findings(tmp_path) == [], "no environment"
    assert findings(tmp_path, "task.environment=games:play", "staleness.max_staleness=0") == []


def test_measurements_of_the_run_are_worth_more(tmp_path: Path) -> None:
    write_steps(tmp_path, group_s=6.5)
    (warning,) = findings(tmp_path, "task.environment=games:play")
    assert warning.kind == "warning"
    assert warning.text.endswith("staleness.max_staleness = 3 keeps the next leases back. A bound of 7 would be enough")
    write_steps(tmp_path, group_s=2.5)
    assert findings(tmp_path, "task.environment=games:play") == []
