"""Claims about `python -m docs.study`: trials run once, rows are kept, and a stop loses none."""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from docs.study import runs as study_runs
from docs.study.__main__ import app
from docs.study.runs import make_config, run_study, settings_of
from docs.study.tasks import MAIN_TASKS, TASKS
from docs.study.trials import (
    OF_MIXTURES,
    PROBE_FILE,
    Point,
    ProbeRow,
    StudyRow,
    StudyTrial,
    make_trials,
    methods,
    read_lines,
    read_rows,
)
from offbeat.common.errors import SettingError
from offbeat.common.processes.shutdown import StopRequest
from offbeat.deploy.experiments.jobs import FolderBusyError, alone_in

pytestmark = pytest.mark.slow


def row_of(trial: StudyTrial, settings: tuple[str, ...]) -> StudyRow:
    return StudyRow(*trial, settings, "finished", 150, 0.5, 36.0, (Point(0, 0.1), Point(150, 0.5)))


class FakeRuns:
    """Runs that end at once, in threads of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trials: list[StudyTrial] = []
        self.fails_at: int | None = None
        monkeypatch.setattr(study_runs, "run_trial", self.run_trial)
        monkeypatch.setattr(study_runs, "_processes", self.processes)

    def run_trial(self, trial: StudyTrial) -> StudyRow:
        self.trials.append(trial)
        if len(self.trials) == self.fails_at:
            raise RuntimeError("a run failed")
        return row_of(trial, settings_of(trial))

    @contextmanager
    def processes(self, num_jobs: int) -> Iterator[Executor]:
        with ThreadPoolExecutor(num_jobs) as pool:
            yield pool


@pytest.fixture
def fake_runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    monkeypatch.setattr(type(TASKS["reversal"]), "make", lambda task: None)
    return FakeRuns(monkeypatch)


@pytest.fixture
def probed(fake_runs: FakeRuns, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measurements that were made, which all end at once."""
    measured: list[str] = []

    def probe_lag(task: str, lag: int, seed: int, chosen: Sequence[str]) -> list[ProbeRow]:
        measured.append(f"lag {lag}, seed {seed}: {', '.join(chosen)}")
        return [ProbeRow(task, method, lag, seed, 1.0, 1.0, 0.0, 0.0) for method in chosen]

    monkeypatch.setattr(study_runs, "probe_lag", probe_lag)
    return measured


def study(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


CHOSEN = ("--tasks", "reversal", "--methods", "gspo,grpo", "--lags", "0,4", "--seeds", "2")


def test_a_study_is_continued_by_the_same_command(fake_runs: FakeRuns, tmp_path: Path) -> None:
    fake_runs.fails_at = 4
    with pytest.raises(RuntimeError, match="a run failed"):
        study(str(tmp_path), *CHOSEN)
    assert len(read_rows(tmp_path)) == 3
    fake_runs.fails_at = None
    assert "5 runs are to be done; about 0.1 CPU hours" in study(str(tmp_path), *CHOSEN)
    assert len(read_rows(tmp_path)) == 8
    assert len(fake_runs.trials) == 9
    assert "0 runs are to be done" in study(str(tmp_path), *CHOSEN)
    assert len(fake_runs.trials) == 9


def test_every_method_can_be_chosen_by_its_name(tmp_path: Path) -> None:
    names = [name for name in methods() if name not in OF_MIXTURES]
    chosen = ("--tasks", "reversal", "--methods", ",".join(names), "--lags", "0", "--seeds", "1", "--plan")
    assert f"{len(names)} runs are to be done" in study(str(tmp_path), *chosen)


def test_shards_do_every_run_once_in_files_of_their_own(fake_runs: FakeRuns, tmp_path: Path) -> None:
    for shard in ("0/3", "1/3", "2/3"):
        study(str(tmp_path), *CHOSEN, "--shard", shard)
    assert sorted(fake_runs.trials) == sorted(make_trials(["reversal"], ["gspo", "grpo"], [0, 4], [0.0], 2))
    assert sorted(file.name for file in tmp_path.glob("*.jsonl")) == [f"rows-{index}-of-3.jsonl" for index in range(3)]


def test_a_plan_runs_nothing(fake_runs: FakeRuns, tmp_path: Path) -> None:
    # Every method, five lags, five seeds, three tasks; those of mixtures on the one task that has one.
    expected = 5 * 5 * (len(methods()) * len(MAIN_TASKS) - len(OF_MIXTURES) * (len(MAIN_TASKS) - 1))
    assert f"{expected} runs are to be done\n" in study(str(tmp_path), "--plan")
    assert fake_runs.trials == []
    assert list(tmp_path.iterdir()) == []


def test_probes_are_made_once(probed: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        study(str(tmp_path), *CHOSEN, "--probe")
    assert probed == [f"lag {lag}, seed {seed}: gspo, grpo" for seed in (0, 1) for lag in (0, 4)]
    assert len(read_lines(tmp_path / PROBE_FILE, ProbeRow)) == 8


def test_two_processes_never_probe_into_the_same_folder(probed: list[str], tmp_path: Path) -> None:
    with alone_in(tmp_path, name=f".{PROBE_FILE}.lock"), pytest.raises(FolderBusyError, match=r"^FOLDER = .* is running there"):
        study(str(tmp_path), *CHOSEN, "--probe")
    assert probed == []


def test_a_stop_lets_the_runs_under_way_end(fake_runs: FakeRuns, tmp_path: Path) -> None:
    trials = make_trials(["reversal"], ["gspo"], [0, 1, 4], [0.0], 2)
    stop = StopRequest()
    said: list[str] = []

    def say(text: str) -> None:
        if not text.startswith("6 runs are to be done"):
            said.append(text)
            stop.ask("a test")

    run_study(trials, tmp_path, tmp_path / "rows.jsonl", stop, num_jobs=2, say=say)
    assert 1 <= len(said) <= 2
    assert len(read_rows(tmp_path)) == len(said) == len(fake_runs.trials)
    assert re.match(r"1/6 reversal: gspo, lag \d, seed 0: finished after 150 steps, reward 0.500, 36 s; about", said[0])


def test_settings_of_every_trial_are_valid_and_those_of_its_method() -> None:
    for name, task in TASKS.items():
        for method, settings in methods().items():
            config = make_config(StudyTrial(name, method, 4, 0.0, 3))
            assert f"loss.objective={config.loss.objective.partition('(')[0]}" in settings
            assert (config.run.seed, config.model.path, config.train.steps_per_batch) == (3, task.model_path, 1)


@pytest.mark.parametrize("name", TASKS)
def test_methods_train_on_as_many_completions_per_step_whatever_their_groups(name: str) -> None:
    sizes = set()
    for method in ("gspo", "sao + own critic"):
        config = make_config(StudyTrial(name, method, 4, 0.0, 3))
        sizes.add(config.train.groups_per_step * config.rollout.group_size)
        assert (config.rollout.group_size == 1) == (method == "sao + own critic")
    assert len(sizes) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tasks", "chess"),
        ("--methods", "gspo,none"),
        ("--lags", "0,-1"),
        ("--lags", "x"),
        ("--noise", "-1"),
        ("--noise", "nan"),
        ("--noise", "loud"),
        ("--shard", "3/3"),
        ("--shard", "3"),
        ("--plan", "--probe"),
        ("--shard", "0/2", "--probe"),
        ("--jobs", "2", "--probe"),
        ("--noise", "0.05", "--probe"),
    ],
)
def test_wrong_arguments_are_named(fake_runs: FakeRuns, probed: list[str], tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SettingError, match=f"^{re.escape(arguments[0])} = "):
        study(str(tmp_path), *arguments)
    assert fake_runs.trials == probed == []


@pytest.mark.parametrize("arguments", [(), ("--plan",), ("--probe",), ("--page", "study.md")])
def test_a_file_in_the_place_of_the_folder_is_named(
    fake_runs: FakeRuns, probed: list[str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SettingError, match=f'^FOLDER = "{file}": '):
        study(str(file), *CHOSEN, *arguments)
    assert fake_runs.trials == probed == []
