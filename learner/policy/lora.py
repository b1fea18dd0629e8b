"""The policy's low-rank adapter (peft): a few trained parameters beside frozen weights, published as merged weights."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.learner.policy.zero import full_shape, gathered_parameters

_ADAPTER = "default"
"""What peft calls an adapter that is given no name."""
_LOW, _HIGH = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"
"""What peft adds to an adapted layer's name for A, `[rank, in_features]`, and for B, `[out_features, rank]`."""
_BASE = ".base_layer."
"""What peft puts between an adapted layer's name and those of its own, frozen, parameters."""


def add_adapter(policy: PreTrainedModel, *, rank: int, alpha: float, target_modules: tuple[str, ...]) -> None:
    """Freeze the policy and give its linear layers an adapter, in place: `y = W x + (alpha / rank) B A x`.

    `A` `[rank, in_features]` starts random (torch's generator: seed it alike on every rank), `B` `[out_features, rank]` at 0,
    so that the adapted policy starts as the policy itself: LoRA, https://arxiv.org/abs/2106.09685, without dropout. Both
    have the policy's dtype; in bfloat16 their float32 masters are in DeepSpeed's optimizer, as those of all trained weights.

    `target_modules`: names of linear layers, whole (`model.layers.0.self_attn.q_proj`) or from the end (`q_proj`: that of
    every layer); empty: all. The output head, which is applied to chosen positions by its weight alone and may be tied to
    the embedding, is never adapted; nor is what is no `nn.Linear`: in a mixture of experts the router and the experts,
    whose weights are 3-D parameters. Raises `ValueError` for a name that fits no such layer.
    """
    peft = _import_peft()
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=[f"policy.{name}" for name in _matching_layers(policy, target_modules)],
    )
    # In a container: given a policy itself, peft knows some mixtures of experts by their config, takes `down_proj` for their
    # experts' and adapts those.
    peft.inject_adapter_in_model(config, nn.ModuleDict({"policy": policy}), adapter_name=_ADAPTER)


def _import_peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'lora.rank is above 0, but peft is not installed: pip install "offbeat[lora]", or leave the setting at 0'
        ) from error
    return peft


def _matching_layers(policy: PreTrainedModel, target_modules: tuple[str, ...]) -> list[str]:
    """Whole names of the linear layers that are meant; the message for a wrong name offers those that there are."""
    head = policy.get_output_embeddings()
    linear = [name for name, module in policy.named_modules() if isinstance(module, nn.Linear) and module is not head]
    if not linear:
        raise ValueError(f"lora.rank: {type(policy).__name__} has no linear layers to adapt")
    for target in target_modules:
        if not any(_is_meant(name, target) for name in linear):
            available = sorted({name.rpartition(".")[2] for name in linear})
            raise ValueError(f"lora.target_modules: {target!r} fits no linear layer; there are {', '.join(available)}")
    return [name for name in linear if not target_modules or any(_is_meant(name, target) for target in target_modules)]


def _is_meant(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def base_shapes(policy: PreTrainedModel) -> list[tuple[str, tuple[int, ...]]]:
    """Names and whole shapes of what `merged_parameters` gives; no collective."""
    return [(_base_name(name), full_shape(parameter)) for name, parameter in _base_parameters(policy)]


def merged_parameters(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the policy as a model without an adapter has it: its names, its order, tied weights once.

    An adapted layer's weight is `W + (alpha / rank) B A`, added up in float32 and rounded once to the dtype of `W`. The
    policy is left as it is, and one merged weight exists at a time. Beside a bfloat16 `W` the rounding keeps of `B A` only
    what reaches half of the last digit, 0.2% to 0.4% of the element: whoever samples with the merged weights follows the
    adapted policy in steps of that size.

    Works for a policy without an adapter too, also where ZeRO-3 has partitioned it; one with an adapter must be whole. A
    tensor is valid until the next one is asked for. All ranks must exhaust the iterator.
    """
    for name, weight in gathered_parameters(_base_parameters(policy)):
        layer, adapted, own_name = name.rpartition(_BASE)
        if adapted and own_name == "weight":
            yield _base_name(name), _merged(policy.get_submodule(layer), weight)
        else:
            yield _base_name(name), weight


def _base_parameters(policy: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in policy.named_parameters():
        if not name.endswith((_LOW, _HIGH)):
            yield name, parameter


def _base_name(name: str) -> str:
    return name.replace(_BASE, ".")


@torch.no_grad()
def _merged(layer: Any, weight: Tensor) -> Tensor:
    low, high = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    return torch.addmm(weight.float(), high.float(), low.float(), alpha=layer.scaling[_ADAPTER]).to(weight.dtype)


@contextlib.contextmanager
def without_adapter(policy: PreTrainedModel) -> Iterator[None]:
    """Inside, the policy computes as it did before `add_adapter`: the frozen reference, for no memory.

    For forward passes whose gradient nobody asks for; a backward pass belongs outside.
    """
    layers = _adapted_layers(policy)
    if not layers:
        raise ValueError("the policy has no adapter to do without")
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _adapted_layers(policy: PreTrainedModel) -> list[Any]:
    names = [name.removesuffix(_LOW) for name, _ in policy.named_parameters() if name.endswith(_LOW)]
    return [policy.get_submodule(name) for name in names]
