"""NCCL reaches the actors with a GPU of their own; the others pull, or everybody takes part in gloo."""

from typing import Literal

import pytest

from offbeat.learner.weights.actor_versions import Recipient
from offbeat.learner.weights.collective import choose_peers
from offbeat.learner.weights.transport import LearnerGpu
from tests.learner.weights.weight_fakes import TRANSPORT

LEARNERS = "GPU-0"


def reach(backend: Literal["gloo", "nccl", "pull"], **gpus: str | None) -> tuple[str, str]:
    """Return the backend, and the names that it reaches, when these actors live on these GPUs."""
    recipients = [Recipient(name.encode(), name, 0, gpu) for name, gpu in gpus.items()]
    found = choose_peers(recipients, TRANSPORT._replace(backend=backend, gpu=LearnerGpu(0, LEARNERS)))
    return found.backend, b"".join(sorted(found.peers)).decode()


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ({"a": "GPU-1", "b": "GPU-2"}, ("nccl", "ab")),
        ({"a": "GPU-1", "b": None, "c": LEARNERS}, ("nccl", "a")),
        ({"b": "GPU-1", "a": "GPU-1", "c": "GPU-2"}, ("nccl", "ac")),
        ({"a": None, "b": None}, ("gloo", "ab")),
        ({"a": LEARNERS, "b": None}, ("gloo", "ab")),
        ({}, ("gloo", "")),
    ],
)
def test_nccl_takes_one_process_to_a_gpu_and_gloo_takes_all_where_there_is_none(
    gpus: dict[str, str | None], expected: tuple[str, str]
) -> None:
    assert reach("nccl", **gpus) == expected


def test_gloo_reaches_every_actor_and_without_a_collective_none_is_reached() -> None:
    assert reach("gloo", a="GPU-1", b=LEARNERS, c=None) == ("gloo", "abc")
    assert reach("pull", a="GPU-1")[1] == ""
