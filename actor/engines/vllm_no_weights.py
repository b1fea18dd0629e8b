"""vLLM's loader for a model folder without weights: the learner's first update brings them all.

vLLM's own `dummy` loader overwrites constants too: buffers that the model computed, and the scales of an FP8 KV cache, which no
update restores.
"""

from collections.abc import Iterator

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

LOAD_FORMAT = "offbeat_no_weights"
"""vLLM's name for this loader."""


@register_model_loader(LOAD_FORMAT)
class NoWeightsLoader(DummyModelLoader):
    """Gives parameters small random values, with which vLLM measures memory, and leaves the rest as the model was made."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        kept = [(tensor, tensor.clone()) for tensor in _constants(model) if not tensor.is_meta]
        super().load_weights(model, model_config)
        for tensor, value in kept:
            tensor.copy_(value)


def _constants(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers, and the parameters of one number: scales."""
    yield from model.buffers()
    yield from (parameter.data for parameter in model.parameters() if parameter.numel() == 1)


@torch.no_grad()
def spoil(model: nn.Module) -> None:
    """Make every weight NaN: one that no update reaches then shows in the first score of the canary."""
    for parameter in model.parameters():
        # Quantized weights are integers or have one byte.
        if parameter.is_floating_point() and parameter.element_size() > 1:
            parameter.fill_(torch.nan)
