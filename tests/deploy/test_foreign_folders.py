"""Folders of the user named `common` or `learner` beside a config are never imported as ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.common.records.rows import FinalRow, StepRow
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.common.settings.config import Config, DataSection, ModelSection, RolloutSection, TaskSection
from offbeat.common.settings.loading import resolved_toml

pytestmark = pytest.mark.slow

FOREIGN = ("protocols", "common", "actor", "learner", "lab", "deploy")
ALERTS = """
import offbeat

def on_row(row):
    if row["kind"] == "step" and row["policy_version"] == 2:
        raise offbeat.StopRun("two steps are enough")
"""
SMALL_RUN = (
    *("actor.engine=transformers", "hub.address=tcp://127.0.0.1:0", "run.dir=run", "num_steps=200", "groups_per_step=1"),
    *("rollout.group_size=2", "max_staleness=0", "checkpoint_interval=1", "tensorboard=false"),
)
REWARD = "from common.scores import score\n\n\ndef reward(prompt, completion, row):\n    return score(completion)\n"


@pytest.fixture(params=["packages", "namespace packages"])
def home(request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path) -> Path:
    """Return a folder with subfolders named like our rooms. With an `__init__.py`, importing one of them fails."""
    for name in FOREIGN:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "settings.py").write_text("raise ImportError('a foreign module was imported')\n")
        if request.param == "packages" and name != "common":
            (folder / "__init__.py").write_text("raise ImportError('a foreign package was imported')\n")
    (tmp_path / "common" / "scores.py").write_text("def score(text):\n    return len(text)\n")
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    config = Config(
        model=ModelSection(path=str(tiny_model), dtype="float32", max_length=32),
        data=DataSection(train_data="train.jsonl", max_prompt_tokens=8),
        task=TaskSection(reward="my_reward:reward"),
        rollout=RolloutSection(max_new_tokens=8),
    )
    (tmp_path / "run.toml").write_text(resolved_toml(config))
    return tmp_path


def offbeat(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat.deploy.cli.main", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_commands_run_beside_folders_of_the_same_names(home: Path) -> None:
    assert "Operate a RUN" in offbeat(home, "--help").stdout
    checked = offbeat(home, "check", "run.toml")
    assert checked.returncode == 0, checked.stderr
    assert 'reward = "my_reward:reward"' in checked.stdout


@pytest.mark.parametrize("service", ["learner", "actor"])
def test_service_checks_its_arguments_beside_folders_of_the_same_names(home: Path, service: str) -> None:
    refused = offbeat(home, service, "run.toml", "train.num_step=3")
    assert refused.returncode == 2, refused.stderr
    assert "Did you mean train.num_steps?" in refused.stderr.splitlines()[-1]


@pytest.mark.service
@pytest.mark.engine
@pytest.mark.parametrize("home", ["packages"], indirect=True)
def test_whole_run_trains_beside_folders_of_the_same_names_until_its_callback_stops_it(home: Path) -> None:
    (home / "common" / "alerts.py").write_text(ALERTS)
    (home / "train.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    trained = offbeat(home, "train", "run.toml", *SMALL_RUN, "metrics.callback=common.alerts:on_row")
    assert trained.returncode == 0, trained.stderr
    assert "a foreign" not in trained.stdout + trained.stderr
    rows = list(read_rows(home / "run" / ROWS_FILE))
    final = rows[-1]
    assert isinstance(final, FinalRow)
    assert (final.outcome, final.detail) == ("stopped", "metrics.callback: two steps are enough")
    # The callback runs beside training, which goes on until the wish arrives.
    assert 2 <= final.policy_version < 200
    assert final.policy_version == sum(isinstance(row, StepRow) for row in rows)
    newest = max(path.name for path in (home / "run" / "checkpoints").glob("step-*"))
    assert newest == f"step-{final.policy_version:08}"
    assert "the run stopped at step" in trained.stderr
    assert "s (metrics.callback: two steps are enough)" in trained.stderr
