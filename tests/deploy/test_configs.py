"""The configs that come with the project are valid."""

from pathlib import Path

import pytest

from offbeat.common.setting_checks import check
from offbeat.common.settings import load

CONFIGS = sorted((Path(__file__).parents[2] / "deploy" / "configs").glob("*.toml"))


def test_there_are_configs() -> None:
    assert {path.stem for path in CONFIGS} >= {"quickstart", "gsm8k_1gpu", "gsm8k_8gpu", "gsm8k_cpu"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_passes_every_check_without_a_warning(path: Path) -> None:
    assert check(load(path)) == []
