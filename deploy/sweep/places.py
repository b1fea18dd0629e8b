"""The part of this machine that each of several runs at once gets: GPUs, or cores where it computes on the CPU."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from offbeat.common.errors import SettingError
from offbeat.deploy.local.devices.inventory import VISIBLE, Gpu, find_gpus


class Place(NamedTuple):
    """The part of one run. The default is the whole machine."""

    cores: tuple[int, ...] = ()
    """Cores that its processes stay on; empty: all."""
    gpus: tuple[str, ...] = ()
    """Entries of `CUDA_VISIBLE_DEVICES`; empty: as it is."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the run's processes."""
        return {VISIBLE: ",".join(self.gpus)} if self.gpus else {}

    def enter(self) -> None:
        """Keep the calling thread, and the processes that it starts from now on, on the cores; Linux only."""
        if self.cores and sys.platform == "linux":
            os.sched_setaffinity(0, self.cores)


def places_here(num_runs: int) -> list[Place]:
    """Divide this machine among as many runs; see `divide`."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return divide(num_runs, find_gpus().gpus, cores)


def divide(num_runs: int, gpus: Sequence[Gpu], cores: Sequence[int]) -> list[Place]:
    """Return equal parts of the GPUs, or of the cores where there is no GPU; what is left over stays idle.

    One run has the whole machine. Raises `SettingError` for more runs than GPUs or cores.
    """
    if num_runs == 1:
        return [Place()]
    of_which, num_parts = ("GPU", len(gpus)) if gpus else ("core", len(cores))
    if num_runs > num_parts:
        problem = f"each run needs a {of_which} of its own, and there are {num_parts}"
        raise SettingError("--jobs", num_runs, problem, f"Give --jobs {num_parts} or less.")
    size = num_parts // num_runs
    parts = [slice(start, start + size) for start in range(0, size * num_runs, size)]
    if gpus:
        return [Place(gpus=tuple(gpu.entry for gpu in gpus[part])) for part in parts]
    return [Place(cores=tuple(cores[part])) for part in parts]
