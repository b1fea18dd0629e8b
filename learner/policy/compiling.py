"""Compiled decoder layers: torch.compile fuses a layer's norms, rotations and activations, which are bound by memory.

The layers are compiled one by one: the second takes the code of the first, and the head and the loss around them stay as they
are. Shapes are dynamic, because each pack has another number of tokens.
"""

import importlib.util
import logging
import os

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat.common.errors import SettingError
from offbeat.common.settings.checks import compile_obstacle
from offbeat.common.settings.config import Config
from offbeat.common.settings.objectives import RECOMPUTED

logger = logging.getLogger(__name__)

DISABLE_VARIABLES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""torch's environment variables that turn compilation off; offbeat sets the first where it finds no GPU."""
MAX_VARIANTS = 16
"""Versions of a layer that torch compiles, such as with and without gradients; it runs a further one uncompiled."""


def check_compiling(config: Config, device: torch.device) -> None:
    """Raise `SettingError` where `train.compile` is on and this process cannot compile; the model need not be loaded."""
    _require_possible(config, _obstacle_here(config, device))


def compiles_layers(config: Config, model: PretrainedConfig, device: torch.device) -> bool:
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


def compile_layers(policy: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile each decoder layer at its first use, in place; names and parameters stay.

    A layer that torch cannot compile runs as before, with a warning.
    """
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = max(MAX_VARIANTS, torch._dynamo.config.recompile_limit)
    layers = [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
    logger.info("compiling %d decoder layers at their first use", len(layers))
