"""Refusals of a device plan whose sums exceed a GPU, with the arithmetic and the settings that would make them fit."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.deploy.local.devices.inventory import Gpu
from offbeat.deploy.local.devices.memory import ModelSizes, Need, engine_need, gib, learner_need

Change = Callable[[Config], tuple[Config, str]]
"""Returns changed settings that save memory, and the change in words."""

_OFFLOAD = 'train.deepspeed={zero_optimization={offload_optimizer={device="cpu"}}}'


class Room(NamedTuple):
    """The memory that an actor has on one of its GPUs."""

    gpu_index: int
    gpu: Gpu
    num_bytes: float
    num_actors: int
    """Actors on the GPU."""
    learner_bytes: float
    """The learner's part of it."""


def check_learner(config: Config, need: Need, gpu: Gpu, sizes: ModelSizes) -> list[str]:
    """Raise `SettingError` where a learner process needs more than this GPU has free.

    Where `launch.learner_gpus` names the GPU, and only the estimated parts of the sum exceed it, return a warning instead.
    """
    if need.num_bytes <= gpu.free_bytes:
        return []
    problem = f"a learner process needs {need}, and the GPU has {gib(gpu.free_bytes)} GiB free"
    if config.launch.learner_gpus and need.certain_bytes <= gpu.free_bytes:
        return [f"launch.learner_gpus: {problem}; the sum is partly an estimate, so the run starts all the same."]
    cure = learner_cure(config, sizes, gpu.free_bytes)
    if need.certain_bytes <= gpu.free_bytes:
        cure += " To start all the same, name the GPUs in launch.learner_gpus."
    raise SettingError("model.path", config.model.path, problem, cure)


def check_actor_share(config: Config, need: Need, room: Room, learner: Need, sizes: ModelSizes) -> list[str]:
    """Raise `SettingError` where an actor's share does not hold its model, or the shares of a GPU exceed it.

    Return a warning instead where a share that the user has set exceeds it by estimated parts of the sum alone.
    """
    if "gpu_memory_utilization" in config.actor.engine_options:
        return _check_given_share(config, need, room, learner)
    if room.num_bytes >= need.num_bytes:
        return []
    others = f", less the learner's {gib(room.learner_bytes)}" if room.learner_bytes else ""
    problem = (
        f"{room.num_actors} on GPU {room.gpu_index} get {gib(max(room.num_bytes, 0.0))} GiB each "
        f"({gib(room.gpu.free_bytes)} GiB free{others} and a reserve), and each needs {need}"
    )
    raise SettingError("launch.num_actors", config.launch.num_actors, problem, _sharing_cure(config, room, sizes))


def _check_given_share(config: Config, need: Need, room: Room, learner: Need) -> list[str]:
    share = config.actor.engine_options["gpu_memory_utilization"]
    setting = "actor.engine_options.gpu_memory_utilization"
    parts = [f"the learner's {gib(room.learner_bytes)}"] * bool(room.learner_bytes)
    parts.append(f"{room.num_actors} x {gib(room.num_bytes)} for actors")
    total = room.learner_bytes + room.num_actors * room.num_bytes
    certain = total - (learner.num_bytes - learner.certain_bytes if room.learner_bytes else 0.0)
    problem = f"on GPU {room.gpu_index} {' + '.join(parts)} = {gib(total)} GiB, and {gib(room.gpu.free_bytes)} GiB are free"
    if certain > room.gpu.free_bytes:
        raise SettingError(setting, share, problem, "Lower it, or remove it: the plan then divides what there is.")
    if room.num_bytes < need.certain_bytes:
        problem = f"it is {gib(room.num_bytes)} GiB of GPU {room.gpu_index}, and an actor needs {need}"
        raise SettingError(setting, share, problem, "Raise it, or give actors their own GPUs.")
    return [f"{setting}: {problem}; the sum is partly an estimate, so the run starts all the same."] * (
        total > room.gpu.free_bytes
    )


def learner_cure(config: Config, sizes: ModelSizes, free_bytes: float) -> str:
    """Return settings that make the learner fit into so much memory, as few as do it."""
    changes = [_checkpointed, _small_batches, _offloaded, _inputs_offloaded]
    return _cure(config, changes, lambda changed: learner_need(changed, sizes).num_bytes <= free_bytes)


def _sharing_cure(config: Config, room: Room, sizes: ModelSizes) -> str:
    """Return settings with which all who are on an actor's GPU fit on it together."""

    def fits(changed: Config) -> bool:
        learner = learner_need(changed, sizes).num_bytes if room.learner_bytes else 0.0
        num_actors = min(room.num_actors, changed.launch.num_actors)
        needed = learner + engine_need(changed, sizes).num_bytes * num_actors
        # One part in a hundred more than the plan's reserve, because shares are rounded down.
        return needed <= room.gpu.free_bytes - 0.06 * room.gpu.total_bytes

    of_learner = [_checkpointed, _small_batches, _offloaded, _inputs_offloaded] if room.learner_bytes else []
    return _cure(config, [_one_actor, *of_learner], fits)


def _cure(config: Config, changes: Sequence[Change], fits: Callable[[Config], bool]) -> str:
    """Return the first change that is enough, else the first few that are together."""
    for change in changes:
        if fits(change(config)[0]):
            return f"Set {change(config)[1]}."
    together, said = config, []
    for change in changes:
        changed, text = change(together)
        if changed != together:
            together, said = changed, [*said, text]
        if fits(together):
            return f"Set {', '.join(said)}."
    if config.train.zero_stage < 3:
        return "Train on more GPUs (launch.learner_processes, train.zero_stage=3), an adapter (lora.rank), or a smaller model."
    return "Train on more or larger GPUs, an adapter (lora.rank), or a smaller model."


def _checkpointed(config: Config) -> tuple[Config, str]:
    checkpointing = config.train.activation_checkpointing or True
    changed = replace(config, train=replace(config.train, activation_checkpointing=checkpointing))
    return changed, "train.activation_checkpointing=true"


def _inputs_offloaded(config: Config) -> tuple[Config, str]:
    changed = replace(config, train=replace(config.train, activation_checkpointing="offload"))
    return changed, 'train.activation_checkpointing="offload"'


def _one_actor(config: Config) -> tuple[Config, str]:
    return replace(config, launch=replace(config.launch, num_actors=1)), "launch.num_actors=1"


def _small_batches(config: Config) -> tuple[Config, str]:
    tokens = min(config.train.micro_batch_tokens, config.model.max_length)
    changed = replace(config, train=replace(config.train, micro_batch_tokens=tokens))
    return changed, f"train.micro_batch_tokens={tokens}"


def _offloaded(config: Config) -> tuple[Config, str]:
    zero = {**config.train.deepspeed.get("zero_optimization", {}), "offload_optimizer": {"device": "cpu"}}
    train = replace(config.train, deepspeed={**config.train.deepspeed, "zero_optimization": zero})
    return replace(config, train=train), _OFFLOAD
