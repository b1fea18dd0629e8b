"""The DeepSpeed options that `train.deepspeed` may hold, known without importing DeepSpeed, which takes seconds."""

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
