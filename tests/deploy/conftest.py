"""Fixtures of several test files in this folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.deploy.operating import link as questions
from tests.deploy.local.warm import WarmProcess
from tests.deploy.operating.operator_desk import Desk
from tests.deploy.services import Services, services_in


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmProcess]:
    """Yield the process that services are forked from. Tests that use it get the marker `service`."""
    process = WarmProcess()
    yield process
    process.close()


@pytest.fixture
def services(tmp_path: Path, warm: WarmProcess) -> Iterator[Services]:
    """Yield services that run in the test's folder and end with the test."""
    with services_in(tmp_path, warm) as running:
        yield running


@pytest.fixture
def desks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Desk]]:
    # On a busy machine a handshake may take its time.
    monkeypatch.setattr(questions, "ANSWER_S", 60.0)
    opened: list[Desk] = []
    yield opened
    for desk in opened:
        desk.close()


@pytest.fixture
def cluster() -> Iterator[Path]:
    """Yield a folder for Slurm with a short path: its daemons' sockets lie below, and a socket's path has at most 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
