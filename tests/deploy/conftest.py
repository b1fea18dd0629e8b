"""Fixtures of several of these files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.deploy.live import link as questions
from tests.deploy.live.operator_desk import Desk
from tests.deploy.services import Services, services_in
from tests.deploy.warm import WarmProcess


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmProcess]:
    """The process that services are forked from. Every test that uses it gets the marker `service`."""
    process = WarmProcess()
    yield process
    process.close()


@pytest.fixture
def services(tmp_path: Path, warm: WarmProcess) -> Iterator[Services]:
    """Commands that run in the test's folder and end with the test."""
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
