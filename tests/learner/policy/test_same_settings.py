"""Ranks with other settings or software than rank 0 are refused by name, on every rank."""

import importlib.metadata
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.learner.policy import process_group
from tests.learner.training.trainer_cases import make_config


class Ranks:
    """Two ranks one after the other: the first one's gathered numbers are kept for the second."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.heard: list[torch.Tensor] = []

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        if self.heard:
            return torch.stack([self.heard.pop(0), values])
        self.kept.append(values)
        return torch.stack([values, values])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks()
    monkeypatch.setattr(process_group, "gather_tensors", ranks.gather)
    return ranks


def compare(ranks: Ranks, first: Config, second: Config) -> None:
    process_group.require_same_settings(first)
    ranks.heard = ranks.kept
    process_group.require_same_settings(second)


CONFIG = make_config(Path("model"))


@pytest.mark.parametrize(
    ("setting", "other"),
    [
        ("train.learning_rate", replace(CONFIG, train=replace(CONFIG.train, learning_rate=0.5))),
        ("rollout.temperature", replace(CONFIG, rollout=replace(CONFIG.rollout, temperature=0.5))),
        ("run.seed", replace(CONFIG, run=replace(CONFIG.run, seed=7))),
    ],
)
def test_setting_that_differs_is_named(setting: str, other: Config, ranks: Ranks) -> None:
    with pytest.raises(SettingError, match=rf"{setting} = .*learner ranks 0 and 1 have different values"):
        compare(ranks, CONFIG, other)


def test_paths_and_the_runs_folder_may_differ(ranks: Ranks) -> None:
    model, run = replace(CONFIG.model, path="elsewhere"), replace(CONFIG.run, dir="elsewhere")
    compare(ranks, CONFIG, replace(CONFIG, model=model, run=run))


def test_software_that_differs_is_named_before_any_setting(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    process_group.require_same_settings(CONFIG)
    ranks.heard = ranks.kept
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == "deepspeed" else version(name))
    with pytest.raises(SettingError, match=r"package deepspeed = .*Install the same versions everywhere"):
        process_group.require_same_settings(replace(CONFIG, run=replace(CONFIG.run, seed=7)))
