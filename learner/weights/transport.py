"""The settings by which weights travel, as the publisher uses them: addresses, sizes in bytes, deadlines."""

from typing import Literal, NamedTuple


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
    """None when the learner trains on a CPU; no backend is `nccl` then."""
