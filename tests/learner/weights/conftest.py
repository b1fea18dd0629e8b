"""Learners with a GPU, on machines without one: their buffers are not pinned, as CUDA's runtime is not there."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def unpinned() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not torch.cuda.is_available():
            monkeypatch.setattr("offbeat.learner.weights.double_buffer.pin", lambda *_: None)
        yield
