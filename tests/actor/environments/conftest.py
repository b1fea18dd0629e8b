"""Fixtures of the tests that start environment workers."""

from collections.abc import Iterator

import pytest

from offbeat.actor.environments.worker_starts import WorkerStarts
from tests.actor.environments.scripted_model import Model


class SharedForks(WorkerStarts):
    """Forks for all tests of a module, which close their workers."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def forks() -> Iterator[WorkerStarts]:
    """The imports take seconds."""
    forks = SharedForks(forks=True, has_parser=False)
    yield forks
    WorkerStarts.close(forks)


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.shutdown()
