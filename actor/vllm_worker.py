"""An extension of vLLM's workers that loads new weights in place."""

import functools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from offbeat.actor.shared_weights import map_weights
from offbeat.protocols.messages import TensorSpec

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class WeightLoading:
    """Mixed into vLLM's worker class by `worker_extension_cls`; called through `LLMEngine.collective_rpc`."""

    model_runner: "GPUModelRunner"
    """Attribute of the worker class that this is mixed into."""

    def load_host_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the model's parameters by `weights`, host tensors that stay valid during the call."""
        _silence_reload_warnings()
        model = self.model_runner.get_model()
        if not current_platform.is_cpu():
            self.model_runner.reload_weights(weights)
            return
        _unpack_experts(model)
        self.model_runner.reload_weights(weights)
        _repack_tied_heads(model)

    def load_shared_weights(self, path: str, layout: tuple[TensorSpec, ...]) -> None:
        """Replace the model's parameters by the weights of a `SharedWeights`."""
        self.load_host_weights(map_weights(path, layout).views())


@functools.cache
def _silence_reload_warnings() -> None:
    """Drop vLLM's warnings about modules without weights, which it repeats at every update."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    logger.addFilter(lambda record: record.args not in [("ParallelLMHead",), ("RotaryEmbedding",)])


def _unpack_experts(model: nn.Module) -> None:
    """Make the next reload pack the experts anew.

    On a CPU vLLM packs expert weights only when it builds their kernel; a reload beside an existing kernel copies plain
    weights over the packed ones, and the experts compute nonsense.
    """
    for module in model.modules():
        if isinstance(module, UnquantizedFusedMoEMethod):
            module.moe_kernel = None


def _repack_tied_heads(model: nn.Module) -> None:
    """Bring an output head that shares the embedding's weights up to date.

    On a CPU such a head has its own packed copy, which a reload of the embedding leaves as it was.
    """
    embeddings = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    for head in model.modules():
        if isinstance(head, ParallelLMHead) and any(head.weight is embedding.weight for embedding in embeddings):
            head.quant_method.process_weights_after_loading(head)
