"""Claims about `lab.run_summary`: every run below a folder is listed once, as its rows say it stands."""

import errno
import os
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from offbeat.common.records.rows import ActorRow, encode_row
from offbeat.lab.run_summary import list_runs, render_runs
from tests.lab.sweep.test_comparison_page import START, write_run


def test_runs_are_listed_with_their_states_the_newest_last(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/long", [0.1] * 9, "[train]\nnum_steps = 20\n", outcome=None)
    write_run(tmp_path / "runs/sweep/lag=1", [0.25, 0.75], "[train]\nnum_steps = 2\n")
    write_run(tmp_path / "runs/broken", [0.1] * 3, "[train\n", outcome="failed")
    (tmp_path / "runs/empty").mkdir()
    runs = list_runs([tmp_path / "runs", tmp_path / "runs/sweep"], now=START + 50)
    assert [Path(run.folder).name for run in runs] == ["lag=1", "broken", "long"]
    assert [run.state for run in runs] == ["finished", "failed", "running"]
    assert [(run.policy_version, run.num_steps, run.reward) for run in runs] == [(2, 2, 0.75), (3, None, 0.1), (9, 20, 0.1)]
    assert [run.wall_s for run in runs] == [9.0, 9.0, None]
    (late,) = [run for run in list_runs([tmp_path / "runs"], now=START + 500) if run.folder.endswith("long")]
    assert late.state == "unfinished"


def test_run_whose_actors_report_is_running_however_long_its_step_takes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.5], "", outcome=None)
    report = ActorRow(
        actor="a", policy_version=0, num_generated_tokens=9, num_groups_sent=0, num_running_completions=1, seconds={}
    )
    with (run / "metrics.jsonl").open("ab") as file:
        for second in range(600):
            file.write(encode_row(msgspec.structs.replace(report, time=START + second)))
        file.write(b'{"kind":"actor","time":1e9')
    (listed,) = list_runs([run], now=START + 610)
    assert (listed.state, listed.last_time) == ("running", START + 599)


def test_runs_of_a_sweep_over_several_settings_are_listed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/sweep-1/max_staleness=4/group_size=8/learning_rate=1e-4/seed=0", [0.5], "")
    write_run(tmp_path / "runs/a/b/c/d", [0.5], "")
    assert [Path(found.folder) for found in list_runs([tmp_path / "runs"], now=START)] == [run]


def test_rows_below_a_runs_own_folder_and_behind_links_are_no_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.5], "")
    write_run(run / "logs", [0.5], "")
    (tmp_path / "latest").symlink_to(run)
    assert [Path(found.folder) for found in list_runs([tmp_path], now=START)] == [run]


def test_folders_that_may_not_be_read_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", [0.5], "")
    (tmp_path / "lost+found").mkdir()
    is_file = Path.is_file

    def is_file_of_mine(path: Path) -> bool:
        if path.parent.name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", is_file_of_mine)
    assert [Path(found.folder) for found in list_runs([tmp_path], now=START)] == [run]


def test_folder_whose_name_is_not_utf8_does_not_cost_the_list(tmp_path: Path) -> None:
    write_run(tmp_path / os.fsdecode(b"run-\xff"), [0.5], "")
    (listed,) = list_runs([tmp_path], now=START)
    assert msgspec.json.decode(msgspec.json.encode(listed))["folder"] == f"{tmp_path}/run-\\udcff"


def test_names_of_folders_are_no_markup(tmp_path: Path) -> None:
    write_run(tmp_path / "[red]x", [0.5], "")
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_runs(list_runs([tmp_path], now=START)))
    assert "[red]x" in capture.get()
