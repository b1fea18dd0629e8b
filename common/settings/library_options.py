"""Settings that are handed to DeepSpeed and to engines, checked without importing either, which takes seconds."""

from offbeat.common.errors import SettingError
from offbeat.common.settings.learning_sections import TrainSection

TABLES = (
    "activation_checkpointing",
    "aio",
    "checkpoint",
    "comms_logger",
    "compile",
    "data_types",
    "flops_profiler",
    "optimizer",
    "tensor_parallel",
    "torch_autocast",
    "zero_optimization",
)
"""Options that are tables."""
VALUES = (
    "communication_data_type",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "gradient_allreduce_op",
    "gradient_predivide_factor",
    "log_level",
    "memory_breakdown",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "sparse_gradients",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
"""Options that are single values."""
REPLACEMENTS = {
    "train_batch_size": "train.groups_per_step",
    "train_micro_batch_size_per_gpu": "train.micro_batch_tokens",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "gradient_clipping": "train.max_grad_norm",
    "scheduler": "train.lr_schedule",
    "bf16": "model.dtype",
    "bfloat16": "model.dtype",
    "fp16": "model.dtype",
}
"""Options that another setting decides, and that setting."""


def check_deepspeed_options(train: TrainSection) -> None:
    """Raise `SettingError` for an option in `train.deepspeed` that is unknown, malformed, another setting's or unsupported."""
    for name, value in train.deepspeed.items():
        setting = f"train.deepspeed.{name}"
        if name in REPLACEMENTS:
            raise SettingError(setting, value, "another setting decides this", f"Use {REPLACEMENTS[name]}.")
        if name not in TABLES and name not in VALUES:
            known = ", ".join(sorted([*TABLES, *VALUES]))
            raise SettingError(setting, value, "DeepSpeed has no such option, or not for this run", f"Known: {known}.")
        if isinstance(value, dict) != (name in TABLES):
            form = "a table" if name in TABLES else "a single value"
            raise SettingError(setting, value, f"the option is {form}", f"Give {form}.")
    zero = train.deepspeed.get("zero_optimization", {})
    if zero.get("stage", train.zero_stage) != train.zero_stage:
        problem = f"train.zero_stage is {train.zero_stage}"
        raise SettingError("train.deepspeed.zero_optimization.stage", zero["stage"], problem, "Set train.zero_stage.")
    for name in ("offload_optimizer", "offload_param"):
        offload = zero.get(name)
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            problem = "checkpoints cannot keep what is on NVMe"
            raise SettingError(f"train.deepspeed.zero_optimization.{name}.device", "nvme", problem, 'Set it to "cpu".')


def deepspeed_warnings(train: TrainSection) -> list[str]:
    """Return warnings about options that silence other settings."""
    if "optimizer" not in train.deepspeed:
        return []
    return [
        "train.deepspeed.optimizer replaces AdamW: train.weight_decay and train.adam_betas are not used; the learning rate is "
        "still train.learning_rate."
    ]


SETTING = "train.sequence_parallel_size"


def check_groups(size: int, *, num_processes: int) -> None:
    """Raise `SettingError` where so many learner processes cannot be divided into groups of `size`."""
    if num_processes % size:
        problem = f"{num_processes} learner processes (launch.learner_processes) cannot be divided into groups of {size}"
        raise SettingError(SETTING, size, problem, "Set it to a divisor of their number.")


def check_heads(size: int, *, num_heads: int, num_key_heads: int) -> None:
    """Raise `SettingError` for a model whose heads cannot be divided among `size` processes.

    Fewer heads of keys and values than processes are copied, if their number divides the processes'.
    """
    names = ("heads of keys and values", num_key_heads), ("heads", num_heads)
    for name, number in names:
        is_copied = number == num_key_heads < num_heads and size % number == 0
        if number % size and not is_copied:
            problem = (
                f"each process attends with as many heads, and the model has {number} {name}: {number} / {size} is not whole"
            )
            cure = f"Set it to a number that divides {num_heads} and {num_key_heads}."
            raise SettingError(SETTING, size, problem, cure)


SHARE_OPTIONS = {"vllm": "gpu_memory_utilization", "transformers": "max_memory_percent"}
"""The option of each engine that says which part of a GPU's memory it may take."""
RESERVED = {
    "vllm": {
        "model": "it is model.path",
        "dtype": "it is model.dtype",
        "max_model_len": "it is model.max_length",
        "seed": "every actor has its own",
        "logprobs_mode": "behavior log-probs must be those of the distribution sampled from",
        "scheduling_policy": "the canary must not wait behind queued completions",
        "pipeline_parallel_size": "a step of another stage would be in flight when weights change",
        "worker_extension_cls": "weights are loaded through it",
        "enable_return_routed_experts": "it follows loss.routing_replay and metrics.routing_interval",
        "limit_mm_per_prompt": "it follows data.image_field",
        "skip_mm_profiling": "it follows data.image_field",
        "mm_device_do_normalize": "patches of images are normalized as the learner's are",
    },
    "transformers": {
        "return_logprobs": "behavior log-probs are what the learner trains on",
        "per_request_processors": "every lease has its temperature",
        "use_async_batching": "tokens of a step in flight would be counted under the wrong policy version",
        "allow_block_sharing": "new prompts would be continued from keys of older weights",
        "cpu_offload_space": "completions would be continued from keys of older weights, under the newer version alone",
        "seed": "every actor has its own",
    },
}
"""Reasons by engine and option. Whatever the engine's file sets over a user's value belongs here."""
