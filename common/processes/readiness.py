"""Marks by which a service tells its launcher that it has taken its memory on a GPU that several services share."""

import os
from pathlib import Path

READY_VARIABLE = "OFFBEAT_READY_FILE"
"""Environment variable with the file that a service makes when it is ready; set where it shares a GPU with others."""
GPU_BYTES_VARIABLE = "OFFBEAT_GPU_BYTES"
"""Environment variable with the bytes of its GPU that a learner process takes at its start; set where actors share the GPU."""


def report_ready() -> None:
    """Make the file that the launcher waits for before it starts the next process on the same GPU."""
    if READY_VARIABLE in os.environ:
        Path(os.environ[READY_VARIABLE]).touch()
