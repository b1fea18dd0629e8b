"""Fixtures of several of these files."""

from collections.abc import Iterator

import pytest

from offbeat.deploy.live import link as questions
from tests.deploy.live.operator_desk import Desk


@pytest.fixture
def desks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Desk]]:
    # On a busy machine a handshake may take its time.
    monkeypatch.setattr(questions, "ANSWER_S", 60.0)
    opened: list[Desk] = []
    yield opened
    for desk in opened:
        desk.close()
