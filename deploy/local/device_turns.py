"""The device plan at work: what each process is told of its GPUs, and the order in which those of one GPU start.

An engine measures the memory of its GPU while it starts, and takes what others allocate meanwhile for its own. So the learner
takes its part first, and the actors of one GPU start one after the other. Each says so by making a file.
"""

from collections.abc import Set
from pathlib import Path

from offbeat.common.processes.own_process import GPU_BYTES_VARIABLE, READY_VARIABLE
from offbeat.deploy.local.devices.inventory import VISIBLE
from offbeat.deploy.local.devices.memory import CONTEXT_BYTES
from offbeat.deploy.local.devices.plan import Plan


class DeviceTurns:
    """Says what a process is started with, and whether it is its turn; without a plan nothing and always."""

    def __init__(self, plan: Plan | None, folder: Path) -> None:
        """`folder` takes the files by which processes say that they are ready."""
        self._plan = plan
        self._folder = folder

    @property
    def needs_gloo(self) -> bool:
        """Weights cannot travel by NCCL, because processes share a GPU."""
        return self._plan is not None and not self._plan.can_use_nccl

    @property
    def num_places(self) -> int | None:
        """Number of actors that the plan has places for; None without a plan."""
        return None if self._plan is None else len(self._plan.actors)

    def learner_variables(self, rank: int) -> dict[str, str]:
        """Return the variables of a learner process that is about to start; `LOCAL_RANK` counts in these GPUs."""
        if self._plan is None:
            return {}
        variables = {VISIBLE: self._plan.entries(self._plan.learner)}
        if self._plan.learner_bytes is None:
            return variables
        name = f"learner-{rank}" if rank else "learner"
        self.forget(name)
        num_bytes = max(0, self._plan.learner_bytes - int(CONTEXT_BYTES))
        return {**variables, GPU_BYTES_VARIABLE: str(num_bytes), READY_VARIABLE: str(self._mark(name))}

    def actor_variables(self, index: int) -> dict[str, str]:
        """Return the variables of an actor that is about to start."""
        if self._plan is None:
            return {}
        variables = {VISIBLE: self._plan.entries(self._plan.actors[index].gpus)}
        if not self._plan.sharers(index)[1]:
            return variables
        self.forget(f"actor-{index}")
        return {**variables, READY_VARIABLE: str(self._mark(f"actor-{index}"))}

    def actor_settings(self, index: int) -> list[str]:
        """Return the settings that an actor gets beside those of the run."""
        share = self._plan.actors[index].share if self._plan else None
        return [] if share is None else [f"actor.engine_options.gpu_memory_utilization={share:g}"]

    def may_start(self, index: int, running: Set[int]) -> bool:
        """Return whether all who share an actor's GPUs, and are there, have taken their memory; `running`: actors by index."""
        if self._plan is None:
            return True
        with_learner, others = self._plan.sharers(index)
        names = [f"learner-{rank}" if rank else "learner" for rank in range(len(self._plan.learner))] if with_learner else []
        names += [f"actor-{other}" for other in others if other in running]
        return all(self._mark(name).exists() for name in names)

    def forget(self, name: str) -> None:
        """Delete the file by which a process said that it is ready."""
        self._mark(name).unlink(missing_ok=True)

    def _mark(self, name: str) -> Path:
        return self._folder / f"{name}.ready"
