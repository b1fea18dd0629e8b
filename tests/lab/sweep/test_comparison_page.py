"""The page that compares runs: each run in one color, the settings that differ, and runs of any version."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from offbeat.common.errors import SettingError
from offbeat.lab.report.run_report import write_report
from offbeat.lab.run_summary import read_settings
from offbeat.lab.sweep.comparison import MOST_RUNS, differing_settings, write_comparison
from tests.lab.report.test_report import figure_titled, text_of

START = 1_700_000_000.0


def write_run(folder: Path, rewards: list[float], config: str, *, outcome: str | None = "finished") -> Path:
    """Write the rows of a run: a step each second, with one group at lag 0 and one at lag 1."""
    rows: list[dict[str, Any]] = [{"kind": "event", "time": START, "event": "run_started", "detail": "", "actor": ""}]
    for version, reward in enumerate(rewards, start=1):
        row = {"kind": "step", "time": START + version, "policy_version": version, "lag/counts": {"0": 1, "1": 1}}
        rows.append(row | {"reward/mean": reward, "time/step_s": 1.0, "time/wait_rollouts_s": 0.25, "lag/mean": 0.5})
    if outcome:
        books = {"leased": 2, "trained": 2, "dropped": {}, "expired": 0, "in_flight": 0}
        end = {"kind": "final", "time": START + len(rewards), "policy_version": len(rewards), "wall_s": 9.0, "ledger": books}
        rows.append(end | {"outcome": outcome, "detail": ""})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    (folder / "config.toml").write_text(config)
    return folder


def test_page_has_each_runs_curves_and_the_settings_that_differ(tmp_path: Path) -> None:
    first = write_run(tmp_path / "runs/one", [0.1, 0.3, 0.5], '[run]\ndir = "a"\n[staleness]\nmax_staleness = 2\n')
    config = '[run]\ndir = "b"\n[staleness]\nmax_staleness = 8\n[loss]\nobjective = "gspo"\n'
    second = write_run(tmp_path / "runs/<b>", [0.2, 0.2, 0.2], config, outcome=None)
    page = write_comparison([first, second], tmp_path / "page.html").read_text()
    figure = figure_titled(page, "Reward by rollouts")
    assert [trace["name"] for trace in figure["data"]] == ["one", "&lt;b&gt;"]
    assert [trace["x"] for trace in figure["data"]] == [[2, 4, 6], [2, 4, 6]]
    # A mean of the points within two of each.
    assert figure["data"][0]["y"] == pytest.approx([0.3, 0.3, 0.3])
    colors = [[trace["line"]["color"] for trace in figure_titled(page, title)["data"]] for title in ("Policy lag", "Waiting")]
    assert colors == [[trace["line"]["color"] for trace in figure["data"]]] * 2
    assert len(set(colors[0])) == 2
    text = text_of(page)
    assert "staleness.max_staleness 2 8" in text
    assert "loss.objective not set gspo" in text
    assert "run.dir" not in text
    assert "one finished 3 0.300" in text
    assert "<b> unfinished 3 0.200" in text
    assert "<b>" not in page


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / group / "run", [0.5], "") for group in ("x", "y")]
    page = write_comparison(folders, tmp_path / "page.html").read_text()
    assert [trace["name"] for trace in figure_titled(page, "Reward by rollouts")["data"]] == ["x", "y"]
    assert "They differ in no setting." in page


def test_folders_whose_names_are_not_utf8_have_pages(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / os.fsdecode(name), [0.5], "") for name in (b"run-\xfe", b"run-\xff")]
    page = write_comparison(folders, tmp_path / "page.html").read_text()
    assert [trace["name"] for trace in figure_titled(page, "Reward by rollouts")["data"]] == ["run-\\udcfe", "run-\\udcff"]
    assert "run-\\udcfe" in write_report(folders[0]).read_text()


def test_settings_differ_by_their_values(tmp_path: Path) -> None:
    first = write_run(tmp_path / "one", [0.5], "[train]\nlearning_rate = 1e-3\nnum_steps = 4\n[hub.keys]\na = 1\n")
    second = write_run(tmp_path / "two", [0.5], "[train]\nlearning_rate = 0.001\nnum_steps = 5\n")
    found = differing_settings([read_settings(first), read_settings(second)])
    assert found == {"train.num_steps": ["4", "5"], "hub.keys.a": ["1", "not set"]}


@pytest.mark.parametrize("num_runs", [1, MOST_RUNS + 1])
def test_too_few_or_too_many_runs_are_refused(num_runs: int, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=f"{num_runs} runs cannot be compared"):
        write_comparison([tmp_path] * num_runs, tmp_path / "page.html")


def test_folder_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"RUN = .*it has no metrics\.jsonl"):
        write_comparison([write_run(tmp_path / "one", [0.5], ""), tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
