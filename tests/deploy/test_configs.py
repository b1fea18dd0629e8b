"""The project's configs are valid, and each example says how to run it."""

import re
from pathlib import Path

import pytest

from offbeat.common.settings.checks import check_before_run
from offbeat.common.settings.loading import load

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir())
CONFIGS = [ROOT / "deploy/local/quickstart/quickstart.toml", *(folder / "run.toml" for folder in EXAMPLES)]


def test_there_are_examples() -> None:
    assert {folder.name for folder in EXAMPLES} >= {"gsm8k_1gpu", "gsm8k_8gpu", "gsm8k_cpu", "gspo_roll"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_config_passes_every_check_without_a_warning(path: Path) -> None:
    assert check_before_run(load(path)) == []


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_example_tells_the_command_that_runs_it(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert re.search(rf"(offbeat train|./dev train|-m offbeat.deploy.cli.main learner) examples/{folder.name}/run.toml", text)
