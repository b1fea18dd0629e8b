"""The device plan: which process of `offbeat train` works on which GPU, with how much of its memory.

The learner comes first, one GPU to each of its processes; the actors get the rest. Where too few are left, actors share GPUs,
with each other or with the learner, and each gets a stated share of the memory. Settings that name GPUs or shares win. The plan
is a pure function of settings, GPUs and the model's sizes; `inventory` and `memory` find those.

Where parts do not fit on a single GPU, learner and actors use it in turns (`common.processes.gpu_turn`).

`DeviceTurns` gives each process its part when it starts. An engine measures the memory of its GPU meanwhile, and takes for its
own what others allocate. So the learner takes its part first, and the actors of one GPU start one after the other.
"""

import contextlib
import importlib.util
from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from offbeat.common.errors import SettingError
from offbeat.common.processes.own_process import GPU_BYTES_VARIABLE, GPU_RESERVE, READY_VARIABLE, TURN_VARIABLE
from offbeat.common.settings.config import Config, most_actors
from offbeat.common.settings.library_options import SHARE_OPTIONS
from offbeat.deploy.local import memory
from offbeat.deploy.local.devices import VISIBLE, Gpu, Inventory, find_gpus
from offbeat.deploy.local.model_sizes import ModelSizes, model_sizes

UNKNOWN_SHARE = 0.5
"""The learner's part of a shared GPU when the model's sizes are not known."""


Engine = Literal["vllm", "transformers"]


class ActorPlace(NamedTuple):
    """An actor's place in the plan."""

    gpus: tuple[int, ...]
    share: float | None = None
    """The part of its GPUs' memory that the plan gives it; None: the option's, or the engine's own."""


class DevicePlan(NamedTuple):
    """The places of all processes; GPUs are indices into `gpus`."""

    gpus: tuple[Gpu, ...]
    learner: tuple[int, ...]
    """The GPU of each learner process."""
    learner_bytes: int | None
    """Memory that a learner process takes at its start, because an actor shares its GPU; None: it takes what it needs."""
    actors: tuple[ActorPlace, ...]
    can_use_nccl: bool
    """True if no two processes of the weights' broadcast share a GPU, which NCCL refuses."""
    engine: Engine = "vllm"
    has_turns: bool = False
    """Learner and actors use the one GPU in turns."""
    notes: tuple[str, ...] = ()
    """The plan in words, a line each."""
    warnings: tuple[str, ...] = ()

    def entries(self, gpus: Sequence[int]) -> str:
        """Return the value of `CUDA_VISIBLE_DEVICES` for a process on these GPUs."""
        return ",".join(self.gpus[gpu].entry for gpu in gpus)

    def sharers(self, actor: int) -> tuple[bool, tuple[int, ...]]:
        """Return whether the learner shares a GPU with this actor, and the other actors that do."""
        gpus = set(self.actors[actor].gpus)
        others = (index for index, place in enumerate(self.actors) if index != actor and gpus & set(place.gpus))
        return bool(gpus & set(self.learner)), tuple(others)


def plan_of_this_machine(config: Config) -> tuple[DevicePlan | None, Inventory]:
    """Return the plan for this machine, None where no GPU is used; raise `SettingError` for one that cannot be."""
    inventory = find_gpus()
    if not inventory.gpus or not config.model.path:
        check_gpus(config, len(inventory.gpus))
        return None, inventory
    return make_plan(config, inventory.gpus, model_sizes(config.model.path), engine_here(config)), inventory


def engine_here(config: Config) -> Engine:
    """Return the engine with which actors in this environment sample."""
    has_vllm = config.actor.engine != "transformers" and importlib.util.find_spec("vllm") is not None
    return "vllm" if has_vllm else "transformers"


def make_plan(config: Config, gpus: tuple[Gpu, ...], sizes: ModelSizes | None, engine: Engine = "vllm") -> DevicePlan:
    """Return the plan of these settings on these GPUs, of which there is at least one.

    `sizes` is None for a model whose sizes are not known: then nothing is refused for its memory. Raises `SettingError`, with
    the arithmetic and the cure, for a plan that cannot fit.
    """
    check_gpus(config, len(gpus))
    _check_instances(config, gpus)
    sharing = config.launch.gpu_sharing
    if sharing == "turns":
        return _make_plan(config, gpus, sizes, engine, has_turns=True)
    try:
        return _make_plan(config, gpus, sizes, engine, has_turns=False)
    except SettingError:
        if sharing == "auto":
            with contextlib.suppress(SettingError):
                return _make_plan(config, gpus, sizes, engine, has_turns=True)
        raise


def _make_plan(
    config: Config, gpus: tuple[Gpu, ...], sizes: ModelSizes | None, engine: Engine, *, has_turns: bool
) -> DevicePlan:
    learner = config.launch.learner_gpus or _learner_gpus(config, len(gpus))
    places = config.launch.actor_gpus or _actor_gpus(config, len(gpus), learner)
    need = memory.learner_need(config, sizes) if sizes else None
    warnings: list[str] = []
    if (most := most_actors(config)) > len(places):
        warnings.append(
            f"launch.num_actors = {len(places)}: actors beyond it have no place on a GPU and are not started, and the run may "
            f"want {most} (scale.actors, scale.max). Set launch.num_actors={most}, and scale.actors to the number at the start."
        )
    if has_turns:
        _check_turns(engine, learner, places, sizes)
    if need and sizes:
        peak = memory.need_beside_sleepers if has_turns else memory.learner_need
        smallest = min((gpus[gpu] for gpu in learner), key=lambda gpu: gpu.free_bytes)
        warnings += memory.check_learner(config, partial(peak, sizes=sizes), smallest)
        need = memory.at_rest(need) if has_turns else need
    taken = need.num_bytes if need else UNKNOWN_SHARE * min(gpus[gpu].free_bytes for gpu in learner)
    shares = _Shares(gpus, dict.fromkeys(learner, taken), places, config.actor.engine_options.get(SHARE_OPTIONS[engine]))
    # transformers takes such a part of what is free when it starts, so never more than its share.
    actors = tuple(ActorPlace(place, shares.of(place)) for place in places)
    if need and sizes and engine == "vllm":
        for room in (room for place in places for room in shares.rooms(place)):
            warnings += memory.check_actor_share(config, memory.engine_need(config, sizes), room, need, sizes)
    plan = DevicePlan(
        gpus,
        learner,
        int(taken) if any(gpu in learner for place in places for gpu in place) and not has_turns else None,
        actors,
        can_use_nccl=_can_use_nccl(config, gpus, [learner[0], *(place[0] for place in places)]),
        engine=engine,
        has_turns=has_turns,
        warnings=tuple(dict.fromkeys(warnings)),
    )
    return plan._replace(notes=tuple(_describe(config, plan, need, sizes)))


def _check_turns(
    engine: Engine, learner: tuple[int, ...], places: tuple[tuple[int, ...], ...], sizes: ModelSizes | None
) -> None:
    """Raise `SettingError` where a GPU cannot be used in turns."""
    if engine != "vllm":
        problem = "only vLLM gives a GPU's memory back, and actors would sample with transformers"
    elif {*learner} != {gpu for place in places for gpu in place} or len(learner) != 1:
        problem = "turns are for one GPU that the learner and all actors share"
    elif sizes is None:
        problem = "the model's sizes are not known, so there is no sum to plan with"
    else:
        return
    raise SettingError("launch.gpu_sharing", "turns", problem, 'Set it to "parts" or "auto".')


def _can_use_nccl(config: Config, gpus: tuple[Gpu, ...], members: Sequence[int]) -> bool:
    """Return whether these members of the weights' broadcast, by GPU, can use NCCL; raise `SettingError` if they must."""
    can = len(set(members)) == len(members) and not any(gpu.is_instance for gpu in gpus)
    if config.weights.backend == "nccl" and not can:
        problem = "NCCL takes one process to a GPU, and the plan puts several on one, or on instances (MIG) of one"
        raise SettingError("weights.backend", "nccl", problem, 'Set weights.backend="gloo", or give each its own GPU.')
    return can


def _learner_gpus(config: Config, num_gpus: int) -> tuple[int, ...]:
    """Return a GPU for each learner process: the first ones that no actor was given, or simply the first ones."""
    ranks = config.launch.learner_processes
    if ranks > num_gpus:
        problem = f"each needs its own GPU, and there {'is' if num_gpus == 1 else 'are'} {num_gpus}"
        raise SettingError("launch.learner_processes", ranks, problem, f"Set launch.learner_processes={num_gpus} or less.")
    given = {gpu for place in config.launch.actor_gpus for gpu in place}
    free = [gpu for gpu in range(num_gpus) if gpu not in given]
    return tuple(free[:ranks] if len(free) >= ranks else range(ranks))


def _actor_gpus(config: Config, num_gpus: int, learner: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the GPUs of each actor: those without a learner process in turn, or all GPUs where too few are without one."""
    size, num_actors = memory.tensor_parallel_size(config), config.launch.num_actors
    if size > num_gpus:
        problem = f"an actor needs as many GPUs, and there {'is' if num_gpus == 1 else 'are'} {num_gpus}"
        raise SettingError("actor.engine_options.tensor_parallel_size", size, problem, f"Set it to {num_gpus} or less.")
    rest = [gpu for gpu in range(num_gpus) if gpu not in learner]
    if len(rest) < size:
        # The learner's last, so that rank 0, which has the most to hold, is spared where it can be.
        rest += reversed(learner)
    slots = [tuple(sorted(rest[start : start + size])) for start in range(0, len(rest) - size + 1, size)]
    return tuple(slots[index % len(slots)] for index in range(num_actors))


class _Shares:
    """Divides each GPU's memory among those who are on it."""

    def __init__(
        self, gpus: tuple[Gpu, ...], taken: dict[int, float], places: tuple[tuple[int, ...], ...], share: object
    ) -> None:
        """`share` is the one that the user has set, None for none."""
        self._gpus = gpus
        self._taken = taken
        self._places = places
        self._explicit = float(share) if isinstance(share, int | float) else None

    def of(self, place: tuple[int, ...]) -> float | None:
        """Return the share that the plan gives an actor at this place, rounded down; None where it need not say one."""
        if self._explicit is not None:
            return None
        share = min(self._bytes_of(gpu) / self._gpus[gpu].total_bytes for gpu in place)
        is_alone = all(self._num_actors(gpu) == 1 and gpu not in self._taken for gpu in place)
        if is_alone and share >= memory.ENGINE_SHARE:
            return None
        return max(0.01, int(share * 100) / 100)

    def rooms(self, place: tuple[int, ...]) -> list[memory.Room]:
        """Return what an actor at this place has on each GPU, first on the one that leaves it the least."""
        share = self._explicit or self.of(place) or memory.ENGINE_SHARE
        gpus = [(gpu, self._gpus[gpu]) for gpu in sorted(place, key=self._bytes_of)]
        return [
            memory.Room(gpu, one, share * one.total_bytes, self._num_actors(gpu), self._taken.get(gpu, 0.0))
            for gpu, one in gpus
        ]

    def _bytes_of(self, gpu: int) -> float:
        """Return the memory of a GPU for each actor on it, when the learner has taken its part."""
        one = self._gpus[gpu]
        reserve = GPU_RESERVE if gpu in self._taken or self._num_actors(gpu) > 1 else 0.02
        return (one.free_bytes - self._taken.get(gpu, 0.0) - reserve * one.total_bytes) / self._num_actors(gpu)

    def _num_actors(self, gpu: int) -> int:
        return sum(gpu in place for place in self._places)


def check_gpus(config: Config, num_gpus: int) -> None:
    """Raise `SettingError` for an index of a GPU that the run does not have, and for NCCL without any."""
    launch = config.launch
    for setting, gpus in (("learner_gpus", launch.learner_gpus), *(("actor_gpus", gpus) for gpus in launch.actor_gpus)):
        absent = [gpu for gpu in gpus if gpu >= num_gpus]
        if absent:
            problem = f"this run has {num_gpus} GPUs, counted from 0, and no GPU {absent[0]}"
            cure = "Name those that it has (CUDA_VISIBLE_DEVICES may hide some), or leave the setting empty."
            raise SettingError(f"launch.{setting}", gpus, problem, cure)
    if config.weights.backend == "nccl" and not num_gpus:
        raise SettingError("weights.backend", "nccl", "this run has no GPU, and NCCL needs one", 'Set weights.backend="auto".')


def _check_instances(config: Config, gpus: tuple[Gpu, ...]) -> None:
    """Raise `SettingError` where one service would use several instances (MIG): CUDA shows a process only one."""
    if not any(gpu.is_instance for gpu in gpus):
        return
    sizes = {
        "launch.learner_processes": config.launch.learner_processes,
        "actor.engine_options.tensor_parallel_size": memory.tensor_parallel_size(config),
    }
    for setting, size in sizes.items():
        if size > 1:
            raise SettingError(setting, size, "the GPUs are instances (MIG), which cannot work together", f"Set {setting}=1.")


def _describe(config: Config, plan: DevicePlan, need: memory.Need | None, sizes: ModelSizes | None) -> list[str]:
    """Return the plan in words."""
    lines = []
    for index, gpu in enumerate(plan.gpus):
        shown = f"GPU {index} ({gpu.name}, {memory.gib(gpu.free_bytes)} of {memory.gib(gpu.total_bytes)} GiB free): "
        there = [
            f"learner{f'-{rank}' if rank else ''}" + (f" {memory.gib(need.num_bytes)} GiB" if need else "")
            for rank, place in enumerate(plan.learner)
            if place == index
        ]
        option = config.actor.engine_options.get(SHARE_OPTIONS[plan.engine])
        for number, actor in enumerate(plan.actors):
            if index in actor.gpus:
                share = actor.share or option
                size = f" {memory.gib(share * gpu.total_bytes)} GiB ({share:g})" if isinstance(share, float) else ""
                there.append(f"actor-{number}{size}")
        lines.append(shown + (", ".join(there) or "nobody"))
    if need and sizes:
        lines.append(f"each learner process, estimated: {need}")
        if config.train.activation_checkpointing == "offload":
            kept = memory.gib(memory.offloaded_bytes(config, sizes))
            lines.append(f"each learner process, in the host's memory for the backward pass: {kept} GiB")
        lines.append(f"each actor, on each of its GPUs, at least: {memory.engine_need(config, sizes)}")
    else:
        lines.append("the model's sizes are not known here, so the plan has no sums")
    if plan.has_turns:
        lines.append("the engines sleep while the learner trains on a batch: they work in turns (launch.gpu_sharing)")
    if plan.learner_bytes is not None:
        lines.append("actors start when the learner has taken its memory, those of one GPU one after the other")
    if not plan.can_use_nccl and config.weights.backend == "auto":
        lines.append("weights travel by gloo: NCCL takes one process to a GPU")
    return lines


class DeviceTurns:
    """Says what a process is started with, and whether it is its turn; without a plan nothing and always."""

    def __init__(self, plan: DevicePlan | None, folder: Path) -> None:
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
        if self._plan.learner_bytes is None and not self._plan.has_turns:
            return variables
        name = f"learner-{rank}" if rank else "learner"
        self.forget(name)
        variables[READY_VARIABLE] = str(self._mark(name))
        if self._plan.learner_bytes is None:
            return {**variables, **self._turn_variables()}
        num_bytes = max(0, self._plan.learner_bytes - int(memory.CONTEXT_BYTES))
        return {**variables, GPU_BYTES_VARIABLE: str(num_bytes)}

    def actor_variables(self, index: int) -> dict[str, str]:
        """Return the variables of an actor that is about to start."""
        if self._plan is None:
            return {}
        variables = {VISIBLE: self._plan.entries(self._plan.actors[index].gpus), **self._turn_variables()}
        if not self._plan.sharers(index)[1]:
            return variables
        self.forget(f"actor-{index}")
        return {**variables, READY_VARIABLE: str(self._mark(f"actor-{index}"))}

    def actor_settings(self, index: int) -> list[str]:
        """Return the settings that an actor gets beside those of the run."""
        if self._plan is None or self._plan.actors[index].share is None:
            return []
        return [f"actor.engine_options.{SHARE_OPTIONS[self._plan.engine]}={self._plan.actors[index].share:g}"]

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

    def _turn_variables(self) -> dict[str, str]:
        has_turns = self._plan is not None and self._plan.has_turns
        return {TURN_VARIABLE: str((self._folder / "gpu.turn").absolute())} if has_turns else {}

    def _mark(self, name: str) -> Path:
        return self._folder / f"{name}.ready"
