"""Loading and saving of the learner's models, checks that the policy can be trained, and compilation of its layers.

Decoder layers are compiled one by one: the second takes the code of the first, and the loss around them stays as it is.
torch.compile fuses what is bound by memory: a layer's norms, rotations and activations, and in the output layer what follows
the matrix products. Shapes are dynamic, because each pack has another number of tokens.
"""

import importlib.util
import logging
import os
import shutil
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from offbeat.common.errors import SettingError, one_line
from offbeat.common.models.folders import GENERATION_FILE, PROCESSOR_FILE, WHOLE_PROCESSOR_FILE, resolve_model
from offbeat.common.settings.checks import compile_obstacle
from offbeat.common.settings.config import Config, ModelSection
from offbeat.common.settings.library_options import SETTING
from offbeat.common.settings.objectives import RECOMPUTED
from offbeat.common.weights.flat import tensor_dtype
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.lora import add_adapter, merged_parameters
from offbeat.learner.policy.packed_attention import find_packing_obstacle, make_trial, packed_logprobs
from offbeat.learner.policy.sequence_parallel import SequenceGroup, check_model_heads

logger = logging.getLogger(__name__)

DISABLE_VARIABLES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""torch's environment variables that turn compilation off; offbeat sets the first where it finds no GPU."""
MAX_VARIANTS = 16
"""Versions of a layer that torch compiles, such as with and without gradients; it runs a further one uncompiled."""
_MAX_HEAD_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of log-probs between packed and plain passes, in nats. Bfloat16 numbers near 10 are 0.06 apart."""


def load_policy(config: Config, sequence_group: SequenceGroup | None = None) -> CompletionLogprobs:
    """Load the policy for training, with an adapter and a critic's value head if the settings ask for them.

    Raises TypeError for a model whose output layer is no Linear.
    """
    policy = _load("model.path", config.model.path, config)
    check_model_heads(policy.config, config.train.sequence_parallel_size)
    if config.lora.rank:
        lora = config.lora
        add_adapter(policy, rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules)
    has_head = config.advantage.baseline == "critic" and config.critic.trunk == "shared"
    return _make_trained(policy, config, value_head=has_head, sequence_group=sequence_group)


def load_critic(config: Config) -> CompletionLogprobs:
    """Load the initial policy with a value head, as the trunk of a critic of its own; without an adapter."""
    return _make_trained(_load("model.path", config.model.path, config), config, value_head=True)


def _make_trained(
    policy: transformers.PreTrainedModel, config: Config, *, value_head: bool, sequence_group: SequenceGroup | None = None
) -> CompletionLogprobs:
    if config.train.activation_checkpointing:
        policy.gradient_checkpointing_enable()
        for module in policy.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # The layer itself and not its children: it checkpoints in training mode only.
                module.training = True
    return CompletionLogprobs(
        policy,
        fp32_head=config.train.fp32_head,
        value_head=value_head,
        sequence_group=sequence_group,
        offloads=config.train.activation_checkpointing == "offload",
    )


def load_reference(config: Config, device: torch.device, sequence_group: SequenceGroup | None = None) -> CompletionLogprobs:
    """Load the frozen reference of the KL, whole on every rank."""
    setting = "kl.reference" if config.kl.reference else "model.path"
    policy = _load(setting, config.kl.reference or config.model.path, config)
    check_model_heads(policy.config, config.train.sequence_parallel_size)
    reference = CompletionLogprobs(policy, fp32_head=config.train.fp32_head, sequence_group=sequence_group)
    return reference.to(device).requires_grad_(False)


@torch.no_grad()
def check_policy(module: CompletionLogprobs, model: ModelSection, device: torch.device) -> None:
    """Choose between packs and whole rows, and raise `SettingError` for a model whose log-probs are not its own in either.

    `CompletionLogprobs` computes logits from the output layer alone. A collective under ZeRO-3.
    """
    policy = module.policy
    if module.packing_obstacle is None:
        module.packing_obstacle = find_packing_obstacle(policy)
    if module.packing_obstacle is not None:
        _accept_rows(module, module.packing_obstacle, model.path)
    trial = make_trial(policy)
    packed = trial.packed.to(device)
    with module.whole_packs():
        logprobs, _, _ = module(*packed.inputs, 1.0)
    expected = packed_logprobs(policy, packed) if module.packing_obstacle is None else trial.plain_logprobs(policy)
    difference = (logprobs - expected).abs().max().item()
    # `not <=` refuses nan too.
    if not difference <= _MAX_HEAD_DIFFERENCE[model.dtype]:
        problem = (
            f"the log-probs that the learner computes differ by {difference:.3g} from those of the model's own forward pass "
            f"({type(policy).__name__}): it changes its logits after the output layer, or its tokens depend on later ones"
        )
        raise SettingError("model.path", model.path, problem, "Train a model with another architecture.")
    if module.sequence_group is not None:
        shared, _, _ = module(*packed.inputs, 1.0)
        difference = (shared - logprobs).abs().max().item()
        if difference > _MAX_HEAD_DIFFERENCE[model.dtype]:
            problem = f"the model's log-probs differ by {difference:.3g} when ranks share a pack"
            raise SettingError(SETTING, module.sequence_group.size, problem, "Set it to 1, or train another architecture.")


def _accept_rows(module: CompletionLogprobs, obstacle: str, path: str) -> None:
    """Say that the model computes whole rows, and what that costs; raise `SettingError` where ranks are to share packs."""
    if module.sequence_group is not None:
        problem = f"ranks share packs, and the model {path!r} cannot be packed: {obstacle}"
        raise SettingError(SETTING, module.sequence_group.size, problem, "Set it to 1.")
    logger.info(
        "%s is not packed, because %s: each completion is computed in a row of its own with its prompt, padded to the longest "
        "of its micro-batch; prompts cost as many times more as groups have completions",
        path,
        obstacle,
    )


def _load(setting: str, path: str, config: Config) -> transformers.PreTrainedModel:
    transformers_logging.disable_progress_bar()
    kind = transformers.AutoModelForImageTextToText if config.data.image_field else transformers.AutoModelForCausalLM
    try:
        policy = kind.from_pretrained(path, dtype=tensor_dtype(config.model.dtype))
        if policy.config.model_type != transformers.AutoConfig.from_pretrained(path).model_type:
            logger.info("%s contains more than a language model: the rest is neither trained nor saved", path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        problem = f"the model cannot be loaded ({one_line(error)})"
        raise SettingError(setting, path, problem, "Give a whole model folder in the Hugging Face layout.") from error
    # Dropout would add noise to the policy's log-probs that the engine's do not have.
    policy.eval()
    return policy


def check_compiling(config: Config, device: torch.device) -> None:
    """Raise `SettingError` where `train.compile` is on and this process cannot compile; the model need not be loaded."""
    _require_possible(config, _obstacle_here(config, device))


def compiles_layers(config: Config, model: transformers.PretrainedConfig, device: torch.device) -> bool:
    """Decide `train.compile`; raise `SettingError` where it is on and cannot be."""
    obstacle = _obstacle_here(config, device)
    if obstacle is None and "num_experts_per_tok" in model.get_text_config().to_dict():
        obstacle = "the experts that tokens are sent to are only known when the layer runs"
    _require_possible(config, obstacle)
    if config.train.compile == "auto" and obstacle is None and config.loss.anchor in RECOMPUTED:
        obstacle = f"passes with and without gradients would round differently, and loss.anchor is {config.loss.anchor!r}"
    if config.train.compile == "auto" and obstacle is not None and device.type == "cuda":
        logger.info("decoder layers are not compiled: %s", obstacle)
    return config.train.compile != "off" and obstacle is None


def _require_possible(config: Config, obstacle: str | None) -> None:
    if config.train.compile == "on" and obstacle is not None:
        raise SettingError("train.compile", "on", obstacle, 'Set it to "auto" or "off".')


def _obstacle_here(config: Config, device: torch.device) -> str | None:
    """Return the reason for which settings or this process rule out compilation; None if there is none."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return "it takes a GPU and the package triton"
    for variable in DISABLE_VARIABLES:
        if os.environ.get(variable) == "1":
            return f"the environment variable {variable} turns compilation off"
    return compile_obstacle(config)


def compile_layers(module: CompletionLogprobs, *, backend: str = "inductor") -> None:
    """Compile each decoder layer and the output layer's work at its first use, in place; names and parameters stay.

    What torch cannot compile runs as before, with a warning.
    """
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = max(MAX_VARIANTS, torch._dynamo.config.recompile_limit)
    layers = [layer for layer in module.policy.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
    module.head.compile_work(backend)
    logger.info("compiling %d decoder layers and the output layer at their first use", len(layers))


def gather_policy(policy: transformers.PreTrainedModel, *, is_keeper: bool) -> dict[str, Tensor]:
    """Return the weights as transformers names them, adapters merged, in CPU memory; empty on ranks that do not keep them.

    A collective under ZeRO-3: every rank calls, and only the keeper holds the whole model.
    """
    state: dict[str, Tensor] = {}
    for name, weight in merged_parameters(policy):
        if is_keeper:
            # Copied one by one: ZeRO's parameters are views into one storage, which would be saved whole for each.
            state[name] = weight.to("cpu", copy=True)
    if is_keeper:
        persistent = policy.state_dict().keys()
        state |= {name: buffer.cpu() for name, buffer in policy.named_buffers() if name in persistent}
    return state


def write_policy(policy: transformers.PreTrainedModel, state: dict[str, Tensor], folder: Path, *, tokenizer: str) -> None:
    """Write gathered weights, config and tokenizer to `folder`; `tokenizer` is the folder or hub name to copy it from."""
    own = policy.generation_config
    assert own is not None, "a policy generates"
    # transformers reads settings that contradict each other, and raises where it is to write them: copied below.
    policy.generation_config = transformers.GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    try:
        policy.save_pretrained(folder, state_dict=state)
    finally:
        policy.generation_config = own
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    for name in (GENERATION_FILE, PROCESSOR_FILE, WHOLE_PROCESSOR_FILE):
        if (file := resolve_model(tokenizer) / name).is_file():
            shutil.copy(file, folder)
