"""Weights in vLLM's workers: an extension that loads new ones in place, and a loader for a model folder that has none."""

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform

from offbeat.actor.engines.engine import spoil
from offbeat.actor.engines.weight_replay import NotReplayableError, Packer, WeightReplay, learn
from offbeat.common.models.folders import make_without_weights
from offbeat.common.weights.flat import Address, buffer_bytes, map_bytes, named_views, pin
from offbeat.protocols.messages import TensorSpec

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


_logger = logging.getLogger(__name__)

LOAD_FORMAT = "offbeat_no_weights"
"""vLLM's name for this loader."""
_PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""vLLM's methods for weights as they are in the checkpoint. On a CPU they keep a packed copy, and no other state of weights."""


class WeightLoading:
    """Mixed into vLLM's worker class by `worker_extension_cls`; called through `LLMEngine.collective_rpc`."""

    model_runner: "GPUModelRunner"
    """Attribute of the worker class that this is mixed into."""
    _replay: WeightReplay | None = None
    """Copies that repeat vLLM's generic reload; None before the first load, and for a model that it does more for than copy."""
    _is_replay_tried: bool = False
    _mapped: tuple[Address, dict[str, torch.Tensor]] | None = None
    """The buffer that was loaded last, as views by name."""

    def load_shared_weights(self, address: Address, layout: tuple[TensorSpec, ...]) -> None:
        """Replace the model's parameters by the weights of a `WeightBuffer`, which does not change during the call."""
        named = self._map(address, layout)
        if self._replay is not None:
            try:
                self._replay.load(named)
            except NotReplayableError as error:
                _logger.warning("vLLM's generic reload takes the place of copies: %s", error)
                self._replay = None
            else:
                self._forget_cached_results()
                return
        if self._is_replay_tried:
            self._reload(named)
        else:
            self._learn(named)

    def spoil_weights(self) -> None:
        """Make every weight NaN, before the first update of a model whose folder has no weights."""
        spoil(self.model_runner.get_model())

    def _map(self, address: Address, layout: tuple[TensorSpec, ...]) -> dict[str, torch.Tensor]:
        """Return views into a `WeightBuffer` by name, mapped and pinned once: it is the same at the next update."""
        if self._mapped is None or self._mapped[0] != address:
            flat = map_bytes(address, buffer_bytes(layout))
            if current_platform.is_cuda():
                pin(flat.untyped_storage(), torch.cuda.current_device())
            views = dict(named_views(flat, layout))
            self._mapped = address, released_weights(self.model_runner.model_config, views)
        return self._mapped[1]

    def _learn(self, weights: dict[str, torch.Tensor]) -> None:
        """Load the weights, and learn to load the next ones as copies."""
        self._is_replay_tried = True
        model = self.model_runner.get_model()
        obstacle = _obstacle_to_replay(model)
        if obstacle is not None:
            _logger.info("weights are loaded by vLLM's generic reload, because of %s", obstacle)
            self._reload(weights)
            return
        try:
            self._replay = learn(model, weights, lambda: self._reload(weights), _packers(model))
        except NotReplayableError as error:
            _logger.info("weights are loaded by vLLM's generic reload: %s", error)

    def _reload(self, weights: dict[str, torch.Tensor]) -> None:
        """Load the weights with vLLM's generic reload."""
        _silence_reload_warnings()
        model = self.model_runner.get_model()
        is_cpu = current_platform.is_cpu()
        if is_cpu:
            _unpack_experts(model)
        # The worker's method, not its runner's: quantized layers ask for vLLM's config.
        cast(Any, self).reload_weights(weights.items())
        if is_cpu:
            _repack_tied_heads(model)

    def _forget_cached_results(self) -> None:
        """Drop what the runner computed from the weights before, as its reload does."""
        self.model_runner.reset_lora_state()
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()


class _WithoutCopies(TorchFunctionMode):
    """Leaves tensors as they lie: a part of a weight stays a view of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def released_weights(model_config: ModelConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return views of a mixture's weights by the names of its released folder, which are those that vLLM loads.

    transformers joins the experts of a layer to one tensor, and vLLM takes it for some models only. Weights of a model without
    experts are returned as they are, and so are those whose released form is computed from them: it would not follow updates.
    """
    if not any(".experts." in name for name in weights):
        return weights
    model = make_without_weights(Path(model_config.model), has_images=model_config.is_multimodal_model)
    with _WithoutCopies():
        released = revert_weight_conversion(model, weights)
    return released if _storages(released) <= _storages(weights) else weights


def _storages(weights: dict[str, torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in weights.values()}


def _obstacle_to_replay(model: nn.Module) -> str | None:
    """Return the type of a module that keeps more of its weights than copies in its parameters; None if there is none."""
    for module in model.modules():
        if isinstance(module, MLAAttention):
            return type(module).__name__
        method = getattr(module, "quant_method", None)
        is_experts = isinstance(method, UnquantizedFusedMoEMethod) and not current_platform.is_cpu()
        if isinstance(method, QuantizeMethodBase) and not is_experts and type(method) not in _PLAIN_METHODS:
            return type(method).__name__
    return None


def _packers(model: nn.Module) -> list[Packer]:
    """Return the methods that pack weights outside the parameters: on a CPU all of them, elsewhere none."""
    if not current_platform.is_cpu():
        return []
    methods = {id(module.quant_method): module.quant_method for module in model.modules() if hasattr(module, "quant_method")}
    return [method for method in methods.values() if isinstance(method, _PLAIN_METHODS)]


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


@register_model_loader(LOAD_FORMAT)
class NoWeightsLoader(DummyModelLoader):
    """Gives parameters small random values, with which vLLM measures memory, and leaves the rest as the model was made."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        # Parameters of one number are scales.
        scales = (parameter.data for parameter in model.parameters() if parameter.numel() == 1)
        kept = [(tensor, tensor.clone()) for tensor in (*model.buffers(), *scales) if not tensor.is_meta]
        super().load_weights(model, model_config)
        for tensor, value in kept:
            tensor.copy_(value)
