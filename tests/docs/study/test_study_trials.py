"""Claims about `docs.study.trials`: which runs there are, and that a row is written whole or not at all."""

from pathlib import Path

import pytest

from docs.study.trials import Point, StudyRow, StudyTrial, append_row, left_to_do, make_trials, methods, read_rows
from offbeat.common.errors import SettingError
from offbeat.common.settings.loading import load
from offbeat.common.settings.objectives import DEFAULTS

CELL = StudyTrial("reversal", "gspo", 4, 0.0, 1)


def make_row(trial: StudyTrial = CELL, *, final_reward: float = 0.5, settings: tuple[str, ...] = ("a=1",)) -> StudyRow:
    points = (Point(0, 0.1), Point(5, 0.2, reward=0.15, grad_norm=2.0))
    return StudyRow(*trial, settings, "finished", 5, final_reward, 1.5, points)


def test_every_objective_is_a_method_and_valid() -> None:
    assert list(methods())[: len(DEFAULTS)] == list(DEFAULTS)
    for settings in methods().values():
        load(None, settings)


def test_trials_of_one_seed_come_before_the_next() -> None:
    trials = make_trials(["a", "b"], ["gspo", "grpo"], [0, 4], [0.0], 2)
    assert len(trials) == len(set(trials)) == 16
    assert [trial.seed for trial in trials] == [0] * 8 + [1] * 8
    assert trials[:2] == [StudyTrial("a", "gspo", 0, 0.0, 0), StudyTrial("a", "grpo", 0, 0.0, 0)]


def test_rows_are_read_as_they_were_written_from_all_files(tmp_path: Path) -> None:
    append_row(tmp_path / "rows.jsonl", make_row())
    append_row(tmp_path / "rows-0-of-2.jsonl", make_row(CELL._replace(seed=2)))
    append_row(tmp_path / "rows.jsonl", make_row(CELL._replace(seed=3)))
    assert sorted(row.seed for row in read_rows(tmp_path)) == [1, 2, 3]
    assert make_row() in read_rows(tmp_path)
    assert make_row().trial == CELL


@pytest.mark.parametrize("num_bytes", [1, 40, -1])
def test_a_torn_last_line_is_passed_over_and_cut_off(tmp_path: Path, num_bytes: int) -> None:
    file = tmp_path / "rows.jsonl"
    append_row(file, make_row())
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:num_bytes])
    assert read_rows(tmp_path) == [make_row()]
    append_row(file, make_row(CELL._replace(seed=2)))
    assert [row.seed for row in read_rows(tmp_path)] == [1, 2]
    assert file.read_bytes().startswith(whole)


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"task": 1}\n')
    with pytest.raises(SettingError, match="line 1 is no row"):
        read_rows(tmp_path)


def test_finished_trials_are_skipped_unless_their_settings_differ() -> None:
    trials = [CELL, CELL._replace(seed=2)]
    settings = dict.fromkeys(trials, ("a=1",))
    assert left_to_do(trials, [make_row()], settings) == trials[1:]
    with pytest.raises(SettingError, match="was run with a=2, not a=1"):
        left_to_do(trials, [make_row(settings=("a=2",))], settings)
    assert left_to_do(trials, [make_row(CELL._replace(seed=7), settings=("a=2",))], settings) == trials
