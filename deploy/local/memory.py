"""Memory that a run's processes take on a GPU, computed from the settings and from the model's sizes in its config.json.

Weights, optimizer, gradients and buffers are arithmetic, which tests hold to what DeepSpeed allocates on two ranks. Activations
follow from what autograd keeps in a model of Llama's structure; tests count that too, at the shapes of an 8B model, and for
eager attention, linear attention and state spaces at those of tiny models. What CUDA
and the kernels take is an estimate. On one GPU, runs at the shapes of 0.6B stayed within these sums (docs/benchmarks.md).

A device plan whose sums exceed a GPU is refused, with the arithmetic and the settings that would make them fit. So is a run
without GPUs that exceeds the machine's memory; its sums were compared with real processes (docs/benchmarks.md).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from offbeat.common.errors import SettingError
from offbeat.common.formats import to_toml
from offbeat.common.processes.own_process import GPU_RESERVE
from offbeat.common.settings.config import Config, has_own_critic, max_episode_tokens, most_actors
from offbeat.common.settings.loading import load_text, resolved_toml
from offbeat.deploy.local.devices import Gpu
from offbeat.deploy.local.model_sizes import ModelSizes, model_sizes

GIB = float(1 << 30)
LEARNER_LIBRARIES = 1.0 * GIB
"""Memory of a learner process on a CPU before it loads a model."""
ENGINE_LIBRARIES = 1.2 * GIB
"""Memory of an actor on a CPU before it loads a model."""
CPU_KV_CACHE = 0.25 * GIB
"""Least KV cache of vLLM on a CPU; the transformers engine allocates as it goes."""
CONTEXT_BYTES = 1.0 * GIB
"""CUDA context, cuBLAS and NCCL of one process, and what its allocator cannot use."""
ENGINE_BYTES = 1.5 * GIB
"""Memory of an engine for its context, CUDA graphs and activations: all but weights, logits and KV cache."""
ENGINE_SHARE = 0.92
"""vLLM's share of a GPU without `gpu_memory_utilization`."""
ENGINE_LOGITS = 1024
"""Rows of logits, in float32 and twice, that an engine holds at once."""
HEAD_BYTES = 0.25 * GIB
"""Chunks of logits that the learner computes at once, and what is computed from them."""
REDUCE_BUCKET = 500_000_000
"""Numbers in DeepSpeed's buffer of gradients, whatever the model's size."""
LIVE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 holds whole at once at most, and numbers in one step of its optimizer."""
FULL_LENGTH = 2
"""Completions of full length that a KV cache has room for at least."""
BYTES = {"float32": 4, "bfloat16": 2}
"""Size of a weight, by `model.dtype`."""


class MemoryPart(NamedTuple):
    """A named part of a sum."""

    name: str
    num_bytes: float
    is_estimate: bool = False


class Need(NamedTuple):
    """The memory of one process on each of its GPUs."""

    parts: tuple[MemoryPart, ...]

    @property
    def num_bytes(self) -> float:
        return sum(part.num_bytes for part in self.parts)

    @property
    def certain_bytes(self) -> float:
        """The sum without the estimated parts."""
        return sum(part.num_bytes for part in self.parts if not part.is_estimate)

    def part_bytes(self, name: str) -> float:
        """Return the part of this name."""
        return sum(part.num_bytes for part in self.parts if part.name == name)

    def __str__(self) -> str:
        parts = " + ".join(f"{part.name} {gib(part.num_bytes)}" for part in self.parts if part.num_bytes >= 0.005 * GIB)
        return f"{parts} = {gib(self.num_bytes)} GiB"


def gib(num_bytes: float) -> str:
    """Return a size in GiB with the digits that matter."""
    return f"{num_bytes / GIB:.2g}" if num_bytes < GIB else f"{num_bytes / GIB:.1f}"


def learner_need(config: Config, sizes: ModelSizes) -> Need:
    """Return the peak memory of one learner process."""
    train, dtype_bytes = config.train, BYTES[config.model.dtype]
    is_bfloat16 = config.model.dtype == "bfloat16"
    # Stage 0 becomes stage 1 in bfloat16.
    stage = max(1, train.zero_stage) if is_bfloat16 else train.zero_stage
    ranks = config.launch.learner_processes
    num_trained = trained_parameters(config, sizes)
    kept, owned = sizes.num_parameters / (ranks if stage == 3 else 1), num_trained / (ranks if stage else 1)
    weights = kept * dtype_bytes
    if stage == 3:
        weights += min(sizes.num_parameters, LIVE_PARAMETERS) * dtype_bytes
    if (config.kl.loss_coef or config.kl.reward_coef) and (config.kl.reference or not config.lora.rank):
        # The reference is whole on every rank. Beside an adapter it is the policy itself, unless it is another model.
        reference = model_sizes(config.kl.reference, asks_hub=False) if config.kl.reference else None
        weights += (reference or sizes).num_parameters * dtype_bytes
    # Under ZeRO the optimizer has float32 weights of its own, also of a float32 model.
    optimizer = 0.0 if _is_offloaded(config) else owned * (12 if stage else 8)
    gradients = _gradient_bytes(config, stage, num_trained, owned)
    if has_own_critic(config):
        # A second model under a second engine, all of it trained.
        whole = sizes.num_parameters / (ranks if stage else 1)
        weights += kept * dtype_bytes
        optimizer += 0.0 if _is_offloaded(config) else whole * (12 if stage else 8)
        gradients += _gradient_bytes(config, stage, sizes.num_parameters, whole)
    # The flat gradient; fused AdamW has no temporaries.
    step = 4 * min(owned, LIVE_PARAMETERS) if stage >= 2 else 0
    activations = _activation_bytes(config, sizes)
    return Need(
        (
            MemoryPart("weights", weights),
            MemoryPart("optimizer", optimizer),
            MemoryPart("gradients", gradients),
            # The two peaks come one after the other.
            MemoryPart("optimizer step", step, True) if step > activations else MemoryPart("activations", activations, True),
            MemoryPart("CUDA", CONTEXT_BYTES, True),
        )
    )


def at_rest(need: Need) -> Need:
    """Return what is left of a learner process's memory between two batches."""
    return Need(tuple(part for part in need.parts if part.name not in ("activations", "optimizer step")))


def need_beside_sleepers(config: Config, sizes: ModelSizes) -> Need:
    """Return what a learner process and sleeping engines take together: context and CUDA graphs stay, as much as awake."""
    sleeping = config.launch.num_actors * ENGINE_BYTES
    return Need((*learner_need(config, sizes).parts, MemoryPart("sleeping engines", sleeping, True)))


def _gradient_bytes(config: Config, stage: int, num_trained: float, owned: float) -> float:
    """Return the gradients at the end of a backward pass, and the buffer in which ranks add them up."""
    if stage >= 2:
        return 4 * (owned + _reduce_bucket(config))
    if stage == 1 and config.model.dtype == "bfloat16":
        # The sums, and those of the last micro-batch.
        return (4 + 2) * num_trained
    if stage == 1:
        # All of them, and this rank's part of the averages.
        return 4 * (num_trained + owned)
    return 4 * (num_trained + (min(num_trained, REDUCE_BUCKET) if config.launch.learner_processes > 1 else 0))


def engine_need(config: Config, sizes: ModelSizes) -> Need:
    """Return the least memory of one actor on each of its GPUs, with a KV cache for `FULL_LENGTH` completions."""
    parallel = tensor_parallel_size(config)
    return Need(
        (
            MemoryPart("weights", _engine_weights(config, sizes) / parallel),
            MemoryPart("KV cache", FULL_LENGTH * completion_bytes(config, sizes)),
            MemoryPart("engine", ENGINE_BYTES + ENGINE_LOGITS * sizes.vocab_size * 8 / parallel, True),
        )
    )


def cpu_learner_need(config: Config, sizes: ModelSizes) -> Need:
    """Return the peak memory of one learner process without a GPU."""
    # An optimizer in host memory is one in this memory.
    on_cpu = replace(config, train=replace(config.train, deepspeed={}))
    parts = (part for part in learner_need(on_cpu, sizes).parts if part.name != "CUDA")
    sent = MemoryPart("weights to send", sizes.num_parameters * BYTES[config.model.dtype])
    return Need((*parts, sent, MemoryPart("libraries", LEARNER_LIBRARIES, True)))


def cpu_actor_need(config: Config, sizes: ModelSizes) -> Need:
    """Return the memory of one actor without a GPU. New weights arrive beside those that sample."""
    weights = _engine_weights(config, sizes)
    return Need(
        (
            MemoryPart("weights", weights),
            MemoryPart("new weights", weights),
            MemoryPart("KV cache", max(CPU_KV_CACHE, FULL_LENGTH * completion_bytes(config, sizes))),
            MemoryPart("libraries", ENGINE_LIBRARIES, True),
        )
    )


def completion_bytes(config: Config, sizes: ModelSizes) -> float:
    """Return the KV cache of one completion of full length on each GPU of an actor, which has one head at least."""
    is_fp8 = str(config.actor.engine_options.get("kv_cache_dtype", "")).startswith("fp8")
    per_token = 2 * sizes.num_attention_layers * sizes.key_value_size * (1 if is_fp8 else BYTES[config.model.dtype])
    states = sizes.scan.num_layers * sizes.scan.state_size * 4 if sizes.scan else 0
    parallel = tensor_parallel_size(config)
    return config.model.max_length * per_token / min(parallel, sizes.num_key_value_heads) + states / parallel


def _engine_weights(config: Config, sizes: ModelSizes) -> float:
    """Return the bytes of an engine's weights; quantization leaves out embeddings and head."""
    dtype_bytes = BYTES[config.model.dtype]
    is_fp8 = str(config.actor.engine_options.get("quantization", "")).startswith("fp8")
    if not is_fp8:
        return sizes.num_parameters * dtype_bytes
    # Two, as of a model whose head is not tied: rather too much memory than too little.
    embeddings = 2 * sizes.vocab_size * sizes.hidden_size
    return embeddings * dtype_bytes + max(0, sizes.num_parameters - embeddings)


def tensor_parallel_size(config: Config) -> int:
    """Return the number of GPUs of one actor; 1 where the option is no such number, which another check refuses."""
    size = config.actor.engine_options.get("tensor_parallel_size", 1)
    return size if isinstance(size, int) and size > 0 else 1


def _activation_bytes(config: Config, sizes: ModelSizes) -> float:
    """Return what one micro-batch keeps for its backward pass, and its head."""
    tokens = _pass_tokens(config)
    scale = BYTES[config.model.dtype] / 2
    hidden, layers = sizes.hidden_size, sizes.num_layers
    # Norms of hidden states (float32 copies), queries, keys, values and their norms and rotation, attention, gated MLP.
    layer = 16 * hidden + 10 * sizes.query_size + 10 * sizes.key_value_size + 8 * sizes.mlp_size
    # With checkpoints one layer is computed again, and its backward pass holds as much once more.
    kept: float = layer * (layers + 1)
    if config.train.activation_checkpointing:
        kept = 2 * layer if config.train.activation_checkpointing == "offload" else 2 * hidden * layers + 2 * layer
    mixing = sizes.mixing_bytes(
        config.model.max_length, BYTES[config.model.dtype], is_checkpointed=bool(config.train.activation_checkpointing)
    )
    # The head's gradient, and under ZeRO-3 the whole head.
    head = 2 * sizes.vocab_size * hidden * BYTES[config.model.dtype] + HEAD_BYTES
    critic = 4 * tokens * hidden if config.advantage.baseline == "critic" else 0
    return tokens * (kept * scale + mixing) + head + critic


def offloaded_bytes(config: Config, sizes: ModelSizes) -> float:
    """Return what one learner process keeps in the host's memory for the backward pass of a micro-batch.

    These are the inputs of each layer and of the last norm, which keeps two copies in float32 as well. torch makes a pinned
    block for each, as large as a power of two.
    """
    if config.train.activation_checkpointing != "offload":
        return 0.0
    numbers = math.ceil(_pass_tokens(config) * sizes.hidden_size)
    own, single = (1 << (numbers * size - 1).bit_length() for size in (BYTES[config.model.dtype], BYTES["float32"]))
    return float((sizes.num_layers + 1) * own + 2 * single)


def _pass_tokens(config: Config) -> float:
    """Return a learner process's tokens of one micro-batch."""
    return max_episode_tokens(config) / config.train.sequence_parallel_size


def trained_parameters(config: Config, sizes: ModelSizes) -> int:
    """Return the policy's parameters that are trained: all, or those of an adapter of all linear layers."""
    if not config.lora.rank:
        return sizes.num_parameters
    hidden, inner = sizes.hidden_size, sizes.mlp_size
    attention = 4 * hidden + 2 * sizes.query_size + 2 * sizes.key_value_size
    return config.lora.rank * sizes.num_layers * (attention + 3 * (hidden + inner))


def _zero_options(config: Config) -> dict[str, Any]:
    options = config.train.deepspeed.get("zero_optimization", {})
    return options if isinstance(options, dict) else {}


def _is_offloaded(config: Config) -> bool:
    options = _zero_options(config).get("offload_optimizer")
    return isinstance(options, dict) and options.get("device") == "cpu"


def _reduce_bucket(config: Config) -> float:
    size = _zero_options(config).get("reduce_bucket_size", REDUCE_BUCKET)
    return float(size) if isinstance(size, int | float) else REDUCE_BUCKET


# Refusals


class Room(NamedTuple):
    """The memory that an actor has on one of its GPUs."""

    gpu_index: int
    gpu: Gpu
    num_bytes: float
    num_actors: int
    """Actors on the GPU."""
    learner_bytes: float
    """The learner's part of it."""


def check_learner(config: Config, need_of: Callable[[Config], Need], gpu: Gpu) -> list[str]:
    """Raise `SettingError` where a learner process needs more than `gpu` has free, which of its GPUs has least.

    `need_of` returns the need under settings. Where `launch.learner_gpus` names the GPU, and only the estimated parts of the
    sum exceed it, return a warning instead.
    """
    need = need_of(config)
    if need.num_bytes <= gpu.free_bytes:
        return []
    problem = f"a learner process needs {need}, and the GPU has {gib(gpu.free_bytes)} GiB free"
    if config.launch.learner_gpus and need.certain_bytes <= gpu.free_bytes:
        return [f"launch.learner_gpus: {problem}; the sum is partly an estimate, so the run starts all the same."]
    # With fewer actors, fewer engines sleep.
    changes = [*_learner_changes(config), _one_actor(config)]
    cure = _cure(config, changes, lambda changed: need_of(changed).num_bytes <= gpu.free_bytes)
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


def check_cpu_run(config: Config, sizes: ModelSizes, *, total_bytes: float, free_bytes: float) -> list[str]:
    """Return the sums of a run on this machine's CPUs in words; raise `SettingError` where they exceed its memory.

    Only the parts that are not estimated lead to the error.
    """
    learner, actor, num_actors = cpu_learner_need(config, sizes), cpu_actor_need(config, sizes), most_actors(config)
    total = _cpu_bytes(config, sizes)
    certain = config.launch.learner_processes * learner.certain_bytes + num_actors * actor.certain_bytes
    each = f"{config.launch.learner_processes} x learner: {learner}; {num_actors} x actor: {actor}"
    words = f"without a GPU the run takes up to {gib(total)} GiB, and {gib(free_bytes)} of {gib(total_bytes)} GiB are free"
    if certain > total_bytes:
        room = total_bytes - config.launch.learner_processes * learner.num_bytes
        changes = [_fewer_cpu_actors(config, max(1, int(room / actor.num_bytes))), *_smaller_passes(config)]
        cure = _cure(config, changes, lambda one: _cpu_bytes(one, sizes) <= total_bytes)
        raise SettingError("model.path", config.model.path, f"{words} ({each})", cure)
    return [f"{words} ({each})"]


def _cpu_bytes(config: Config, sizes: ModelSizes) -> float:
    """Return the memory of all processes of a run without GPUs."""
    learners = config.launch.learner_processes * cpu_learner_need(config, sizes).num_bytes
    return learners + most_actors(config) * cpu_actor_need(config, sizes).num_bytes


def _sharing_cure(config: Config, room: Room, sizes: ModelSizes) -> str:
    """Return settings with which all who are on an actor's GPU fit on it together."""

    def fits(changed: Config) -> bool:
        learner = learner_need(changed, sizes).num_bytes if room.learner_bytes else 0.0
        num_actors = min(room.num_actors, changed.launch.num_actors)
        needed = learner + engine_need(changed, sizes).num_bytes * num_actors
        # The plan keeps back what an engine alone leaves, or its reserve and what the rounding of each share takes.
        reserve = max(1 - ENGINE_SHARE, GPU_RESERVE + 0.01 * num_actors)
        return needed <= room.gpu.free_bytes - reserve * room.gpu.total_bytes

    if room.learner_bytes or (config.launch.num_actors > 1 and fits(_with(config, _one_actor(config)))):
        return _cure(config, [_one_actor(config), *_learner_changes(config)], fits)
    more = "Give each actor more GPUs (actor.engine_options.tensor_parallel_size)"
    return f"{more}, lower model.max_length, or take a smaller model."


def _cure(config: Config, changes: Sequence[Mapping[str, str]], fits: Callable[[Config], bool]) -> str:
    """Return the first change of settings that is enough, else the first few that are together."""
    for change in changes:
        if fits(_with(config, change)):
            return _in_words(change)
    changed, together = config, dict[str, str]()
    for change in changes:
        before, changed = changed, _with(changed, change)
        # A later change of a setting takes the place of an earlier one, and what changes nothing is not told.
        together |= change if changed != before else {}
        if fits(changed):
            return _in_words(together)
    if config.train.zero_stage < 3:
        return "Train on more GPUs (launch.learner_processes, train.zero_stage=3), an adapter (lora.rank), or a smaller model."
    return "Train on more or larger GPUs, an adapter (lora.rank), or a smaller model."


def _with(config: Config, settings: Mapping[str, str]) -> Config:
    """Return the config with these settings, which may be paths into a table."""
    return load_text(resolved_toml(config, with_secrets=True), [f"{setting}={text}" for setting, text in settings.items()])


def _in_words(settings: Mapping[str, str]) -> str:
    return f"Set {', '.join(f'{setting}={text}' for setting, text in settings.items())}."


def _one_actor(config: Config) -> dict[str, str]:
    # Without blanks, at which a shell would divide it.
    gpus = to_toml(config.launch.actor_gpus[:1]).replace(" ", "")
    return {"launch.num_actors": "1"} | ({"launch.actor_gpus": gpus} if config.launch.actor_gpus else {})


def _fewer_cpu_actors(config: Config, num_actors: int) -> dict[str, str]:
    launch, scale = config.launch, config.scale
    numbers = {"scale.actors": scale.actors} if scale.actors else {"launch.num_actors": launch.num_actors}
    if scale.auto:
        numbers |= {"scale.min": scale.min, "scale.max": scale.max}
    return {setting: str(num_actors) for setting, number in numbers.items() if number > num_actors}


def _smaller_passes(config: Config) -> list[dict[str, str]]:
    """Return changes with which a learner's pass keeps less."""
    tokens = min(config.train.micro_batch_tokens, config.model.max_length)
    checkpointed = {} if config.train.activation_checkpointing else {"train.activation_checkpointing": "true"}
    return [checkpointed, {"train.micro_batch_tokens": str(tokens)}]


def _learner_changes(config: Config) -> list[dict[str, str]]:
    """Return the changes that save a learner's memory on a GPU, in the order in which they are tried."""
    return [
        *_smaller_passes(config),
        {"train.deepspeed.zero_optimization.offload_optimizer.device": "cpu"},
        {"train.activation_checkpointing": '"offload"'},
    ]
