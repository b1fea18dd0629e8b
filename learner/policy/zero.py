"""DeepSpeed: its config, its engine and the state of that, and whole weights and gradients under ZeRO."""

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch import nn

from offbeat.common.errors import SettingError, one_line
from offbeat.common.processes.environment import fast_imports
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.common.settings.library_options import check_deepspeed_options
from offbeat.learner.policy.logprobs import CompletionLogprobs

_logger = logging.getLogger(__name__)

GATHER_BUCKET_NUMEL = 2**26
"""Numbers gathered at once under ZeRO-3: 128 MiB of bfloat16."""

MAX_FULL_GRADIENTS = 16
"""Number of gradients that `full_gradients` reads under ZeRO."""


_OBJECTS = ("loss_scaler", "param_slice_mappings", "universal_checkpoint_info")
"""Entries of a ZeRO optimizer's state that hold DeepSpeed's objects. A new optimizer of the same settings has the same."""


def deepspeed_config(train: TrainSection, dtype: Literal["float32", "bfloat16"]) -> dict[str, Any]:
    """Return the DeepSpeed config of these settings with `train.deepspeed`; raise `SettingError` for its wrong options."""
    check_deepspeed_options(train)
    config: dict[str, Any] = {
        # Micro-batches have any number of rows and accumulate by hand; these two only satisfy DeepSpeed's arithmetic.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Without ZeRO DeepSpeed clips by a norm that it does not report; the trainer computes the norm once and clips.
        "gradient_clipping": train.max_grad_norm if train.zero_stage else 0.0,
        "zero_optimization": {"stage": train.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == "bfloat16":
        # DeepSpeed accumulates bfloat16 gradients in float32 under every stage but 0. Stage 1 differs from stage 0 only in that
        # each rank keeps a part of the optimizer's state.
        config["zero_optimization"]["stage"] = max(1, train.zero_stage)
        config["gradient_clipping"] = train.max_grad_norm
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        config["communication_data_type"] = "fp32"
    return _merged(config, train.deepspeed)


def _merged(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in override.items():
        nested = isinstance(value, dict) and isinstance(base.get(name), dict)
        result[name] = _merged(base[name], value) if nested else value
    return result


def make_engine(module: nn.Module, config: dict[str, Any], train: TrainSection) -> Any:
    """Return the DeepSpeed engine that trains `module` with torch's AdamW, or the optimizer in `train.deepspeed`."""
    deepspeed = _import_deepspeed()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = None
    if "optimizer" not in config:
        # Fused: one pass over weights, gradients and moments, without temporaries of their size.
        optimizer = torch.optim.AdamW(
            trained, lr=train.learning_rate, betas=train.adam_betas, weight_decay=train.weight_decay, fused=True
        )
    if config["zero_optimization"]["stage"] == 3 and isinstance(module, CompletionLogprobs):
        deepspeed.zero.register_external_parameter(module.head, module.head.output_layer.weight)
    # DeepSpeed collects garbage four times under bfloat16: modules and model, which live as long as the process, are left out.
    gc.freeze()
    with muted_prints():
        try:
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, model_parameters=trained, config=config)
        # DeepSpeed checks its options with these.
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            if not train.deepspeed:
                raise
            problem = f"DeepSpeed refuses the options ({one_line(error)})"
            raise SettingError("train.deepspeed", train.deepspeed, problem, "Correct them, or remove the setting.") from error
    return engine


def take_step(engine: Any, learning_rate: float, *, max_grad_norm: float) -> float:
    """Clip the gradients and take the optimizer step; return their norm before clipping."""
    for param_group in engine.optimizer.param_groups:
        param_group["lr"] = learning_rate
    norm = None
    if engine.zero_optimization_stage() == 0:
        norm = nn.utils.clip_grad_norm_(engine.module.parameters(), max_grad_norm)
    engine.step()
    return float(norm if norm is not None else engine.get_global_grad_norm())


def optimizer_state(engine: Any) -> dict[str, Any]:
    """Return this rank's part of the optimizer's state: plain values and tensors, without copies."""
    state: dict[str, Any] = engine.optimizer.state_dict()
    return {name: value for name, value in state.items() if name not in _OBJECTS}


def restore_state(engine: Any, parameters: Mapping[str, torch.Tensor], state: dict[str, Any]) -> None:
    """Put whole weights and this rank's `optimizer_state` into the engine; a collective.

    `parameters` are all of the engine's module, by name. Under ZeRO-3 they are not used: the optimizer has this rank's part.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_partition_weights():
        optimizer.checkpoint_event_prologue()
    else:
        with torch.no_grad():
            for name, parameter in engine.module.named_parameters():
                parameter.copy_(parameters[name])
    if engine.zero_optimization():
        # The largest norm is a setting, which may have changed since; DeepSpeed would take the checkpoint's.
        restored = {name: value for name, value in state.items() if name != "clip_grad"}
        states = [{**optimizer.state_dict(), **restored}] * engine.dp_world_size
        optimizer.load_state_dict(states, load_from_fp32_weights=engine.zero_load_from_fp32_weights())
    else:
        optimizer.load_state_dict(state)
    if engine.zero_optimization_partition_weights():
        optimizer.checkpoint_event_epilogue()


@contextlib.contextmanager
def muted_prints() -> Iterator[None]:
    """Send what DeepSpeed prints about its memory and internals to the debug log."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    if printed.getvalue():
        _logger.debug("DeepSpeed printed:\n%s", printed.getvalue())


def _import_deepspeed() -> Any:
    """Import DeepSpeed without its prints, its C++ compilation and its log handlers."""
    with fast_imports():
        import deepspeed

    # On a CPU DeepSpeed would compile a shared-memory all-reduce for a minute; gloo is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # pyright: ignore[reportAttributeAccessIssue]
    logger = logging.getLogger("DeepSpeed")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    return deepspeed


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Return whether ZeRO-3 has split the parameter over the ranks, so that it must be gathered before it is read."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the parameter's whole shape, also while it is partitioned."""
    return tuple(cast(Any, parameter).ds_shape if is_partitioned(parameter) else parameter.shape)


def gathered_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, bucket_numel: int = GATHER_BUCKET_NUMEL
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter whole, by name; under ZeRO-3 a collective that holds one bucket of them at a time.

    A tensor is valid until the next one is yielded. All ranks must exhaust the iterator.
    """
    for bucket in buckets(named_parameters, bucket_numel):
        parameters = [parameter for _, parameter in bucket]
        with _gathered(parameters), torch.no_grad():
            for name, parameter in bucket:
                yield name, parameter.detach()


def buckets(
    named_parameters: Iterable[tuple[str, nn.Parameter]], bucket_numel: int = GATHER_BUCKET_NUMEL
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield parameters in lists of at most `bucket_numel` numbers in all; a larger one is alone in its list."""
    bucket: list[tuple[str, nn.Parameter]] = []
    numel = 0
    for name, parameter in named_parameters:
        size = torch.Size(full_shape(parameter)).numel()
        if bucket and numel + size > bucket_numel:
            yield bucket
            bucket, numel = [], 0
        bucket.append((name, parameter))
        numel += size
    if bucket:
        yield bucket


def full_gradients(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, zero_stage: int
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield gradients of the pending optimizer step by name, averaged over the ranks, not clipped; None for a missing one.

    Read them between the last backward pass and the step. Without ZeRO they are the gradients of all trained parameters. Under
    ZeRO each is a collective, so they are those of at most `MAX_FULL_GRADIENTS` matrices, spread evenly over the model, none
    larger than `GATHER_BUCKET_NUMEL`. A tensor is valid until the next one is yielded. All ranks must exhaust the iterator.
    """
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if zero_stage == 0:
        yield from ((name, parameter.grad) for name, parameter in trained)
        return
    matrices = [
        (name, parameter)
        for name, parameter in trained
        if len(full_shape(parameter)) > 1 and torch.Size(full_shape(parameter)).numel() <= GATHER_BUCKET_NUMEL
    ]
    num_read = min(len(matrices), MAX_FULL_GRADIENTS)
    safe_get_full_grad = _import_deepspeed().utils.safe_get_full_grad
    for index in range(num_read):
        name, parameter = matrices[index * len(matrices) // num_read]
        yield name, safe_get_full_grad(parameter)


def discard_gradients(engine: Any) -> None:
    """Discard the gradients accumulated for the pending optimizer step."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    engine.optimizer.zero_grad(set_to_none=True)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        # Its zero_grad leaves these two, which its step resets.
        engine.optimizer.micro_step_id = -1
        for group in engine.optimizer.averaged_gradients:
            engine.optimizer.averaged_gradients[group] = None


def _gathered(parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
    if not any(is_partitioned(parameter) for parameter in parameters):
        return contextlib.nullcontext()
    return _import_deepspeed().zero.GatheredParameters(parameters)
