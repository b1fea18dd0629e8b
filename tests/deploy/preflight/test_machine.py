"""Checks of the machine that need no port, disk or GPU."""

import importlib.metadata

import pytest

from offbeat.common.config import Config, ModelSection, TaskSection
from offbeat.deploy.preflight.machine import check_companions

CONFIG = Config(model=ModelSection(path="model"), task=TaskSection(train_data="data.jsonl"))


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, ["pip uninstall torchvision"]),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "torchaudio": "2.11.0"}, ["pip uninstall torchaudio"]),
        ({"torch": "2.13.0+cpu"}, []),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, []),
    ],
)
def test_package_of_another_build_than_torch_is_told_with_its_cure(
    installed: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = list(check_companions(CONFIG))
    assert [finding.kind for finding in found] == ["warning"] * len(said)
    for finding, cure in zip(found, said, strict=True):
        assert finding.text.endswith(cure)
