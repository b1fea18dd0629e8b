"""The learner's end of a hub, for tests of the actor."""

from collections.abc import Iterator

import pytest

from tests.actor.actor_harness import Learner


@pytest.fixture
def learner() -> Iterator[Learner]:
    learner = Learner()
    yield learner
    learner.hub.close()
