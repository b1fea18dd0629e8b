"""The sweep of a test."""

from pathlib import Path

import pytest

from tests.deploy.experiments.sweeps import Sweep


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)
