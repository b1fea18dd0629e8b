"""The settings by which weights travel, as the publisher uses them: addresses, sizes in bytes, deadlines."""

from typing import Literal, NamedTuple

import torch

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.common.weights.nccl_group import gpu_uuid
from offbeat.protocols.addresses import host_of

CHUNK_BYTES = 8 << 20
"""Size of one pulled chunk."""
MAX_PULLS = 2
"""Actors that pull at the same time."""


class LearnerGpu(NamedTuple):
    """The GPU of the learner's rank 0."""

    number: int
    """Index among the GPUs that this process sees."""
    uuid: str


class Transport(NamedTuple):
    """`[weights]` of the config, resolved."""

    host: str
    """The learner's host, as actors reach it."""
    listen_on: str
    """Address that the collective's rendezvous store listens on."""
    backend: Literal["gloo", "nccl", "pull"]
    port: int
    """Port of the rendezvous store; 0: any."""
    timeout_s: float
    """Deadline for each phase of an update."""
    bucket_bytes: int
    """Size of one broadcast."""
    chunk_bytes: int
    """Size of one pulled chunk."""
    max_pulls: int
    """Actors that may pull at once."""
    delta: bool = False
    """Offer differences between versions to actors that pull."""
    gpu: LearnerGpu | None = None
    """The GPU of rank 0; None when the learner trains on a CPU, where no backend is `nccl`."""


def resolve_transport(config: Config, device: torch.device, host: str) -> Transport:
    """Return the transport of a learner that trains on this device, and that actors reach at `host`."""
    weights = config.weights
    if weights.backend == "nccl" and device.type != "cuda":
        problem = "the learner trains on a CPU, and NCCL needs a GPU"
        raise SettingError("weights.backend", "nccl", problem, 'Set weights.backend="auto".')
    gpu = LearnerGpu(device.index, gpu_uuid(device.index)) if device.type == "cuda" else None
    return Transport(
        host=host,
        listen_on=host_of(config.hub.bind or config.hub.address),
        backend=weights.backend if weights.backend != "auto" else "gloo" if gpu is None else "nccl",
        port=weights.port,
        timeout_s=weights.timeout_s,
        bucket_bytes=weights.bucket_mb << 20,
        chunk_bytes=CHUNK_BYTES,
        max_pulls=MAX_PULLS,
        delta=weights.delta,
        gpu=gpu,
    )
