"""The policy's low-rank adapter (peft): few trained parameters on frozen weights, published as merged weights."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.common.errors import SettingError
from offbeat.learner.policy.zero import full_shape, gathered_parameters

if TYPE_CHECKING:
    from peft import LoraConfig

_ADAPTER = "default"
"""peft's name of an adapter without a name."""
_LOW, _HIGH = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"
"""peft's suffixes of an adapted layer's name for A, `[rank, in_features]`, and for B, `[out_features, rank]`."""
_BASE = ".base_layer."
"""peft's infix between an adapted layer's name and the names of its frozen parameters."""


def add_adapter(policy: PreTrainedModel, *, rank: int, alpha: float, target_modules: tuple[str, ...]) -> None:
    """Freeze the policy and give its linear layers an adapter, in place: `y = W x + (alpha / rank) B A x`.

    `A` `[rank, in_features]` starts random (from torch's generator: seed every rank alike), `B` `[out_features, rank]` at 0, so
    the adapted policy starts as the policy itself: LoRA, https://arxiv.org/abs/2106.09685, without dropout. Both have the
    policy's dtype; in bfloat16 DeepSpeed's optimizer holds their float32 masters, as for all trained weights.

    `target_modules`: whole names of linear layers (`model.layers.0.self_attn.q_proj`) or their ends (`q_proj` for that of every
    layer); empty for all. Never adapted are the output head, whose weight alone is applied and which may be tied to the
    embedding, and modules that are no `nn.Linear`: in a mixture of experts the router and the experts, whose weights are 3-D
    parameters. Raises `SettingError` for a name that matches no linear layer.
    """
    # Imported here and below: it takes seconds, and most runs train all weights.
    from peft import inject_adapter_in_model

    config = _config(rank, alpha, [f"policy.{name}" for name in _matching_layers(policy, target_modules)])
    # In a container: given the policy itself, peft recognizes some mixtures of experts by their config and adapts their experts
    # where `down_proj` is named.
    inject_adapter_in_model(config, nn.ModuleDict({"policy": policy}), adapter_name=_ADAPTER)


def write_adapter(weights: Mapping[str, Tensor], folder: Path, *, rank: int, alpha: float, base_model: str) -> None:
    """Write the adapter among a trainer's whole weights, named `policy.NAME`, to `folder` as peft and vLLM read it."""
    names = {
        f"base_model.model.{name.removeprefix('policy.').replace(f'.{_ADAPTER}.', '.')}": name
        for name in weights
        if name.endswith((_LOW, _HIGH))
    }
    layers = sorted(name.removeprefix("policy.").removesuffix(_LOW) for name in weights if name.endswith(_LOW))
    config = _config(rank, alpha, layers, task_type="CAUSAL_LM", base_model_name_or_path=base_model, inference_mode=True)
    config.save_pretrained(str(folder))
    save_file({name: weights[ours].contiguous() for name, ours in names.items()}, folder / "adapter_model.safetensors")


def _config(rank: int, alpha: float, layers: list[str], **others: Any) -> "LoraConfig":
    from peft import LoraConfig

    # Its annotation says int, but any number scales the adapter.
    options: dict[str, Any] = {"lora_alpha": alpha, **others}
    return LoraConfig(r=rank, lora_dropout=0.0, bias="none", target_modules=layers, **options)


def _matching_layers(policy: PreTrainedModel, target_modules: tuple[str, ...]) -> list[str]:
    """Return the whole names of the linear layers that the targets match; raise `SettingError` for one that matches none."""
    head = policy.get_output_embeddings()
    # Llama 4's routers are of a class made of it, and return two tensors.
    linear = [name for name, module in policy.named_modules() if type(module) is nn.Linear and module is not head]
    if not linear:
        problem = f"{type(policy).__name__} has no linear layers to adapt"
        raise SettingError("lora.target_modules", target_modules, problem, "Leave lora.rank at 0.")
    for target in target_modules:
        if not any(_is_meant(name, target) for name in linear):
            available = sorted({name.rpartition(".")[2] for name in linear})
            problem = f"{target!r} fits no linear layer of the model"
            raise SettingError("lora.target_modules", target_modules, problem, f"There are: {', '.join(available)}.")
    return [name for name in linear if not target_modules or any(_is_meant(name, target) for target in target_modules)]


def _is_meant(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def base_shapes(policy: PreTrainedModel) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and whole shapes of the weights that `merged_parameters` yields; no collective."""
    return [(base_name(name), full_shape(parameter)) for name, parameter in base_parameters(policy)]


def merged_parameters(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of the policy under the names and in the order of a model without an adapter, tied weights once.

    An adapted layer's weight is `W + (alpha / rank) B A`, summed in float32 and rounded once to the dtype of `W`. The policy
    does not change, and one merged weight exists at a time. With a bfloat16 `W` the rounding loses changes below half of the
    last digit, 0.2% to 0.4% of the element: engines with merged weights follow the adapted policy in steps of that size.

    Works for a policy without an adapter too, even partitioned by ZeRO-3; a policy with an adapter must be whole. A tensor is
    valid until the next one is yielded. All ranks must exhaust the iterator.
    """
    for name, weight in gathered_parameters(base_parameters(policy)):
        yield base_name(name), merged_weight(policy, name, weight)


def merged_weight(policy: PreTrainedModel, name: str, weight: Tensor) -> Tensor:
    """Return a whole weight of `base_parameters` with the adapter's part of it."""
    layer, adapted, own_name = name.rpartition(_BASE)
    return _merged(policy.get_submodule(layer), weight) if adapted and own_name == "weight" else weight


def base_parameters(policy: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the policy's parameters without those of the adapter, tied ones once."""
    for name, parameter in policy.named_parameters():
        if not name.endswith((_LOW, _HIGH)):
            yield name, parameter


def base_name(name: str) -> str:
    """Return the name that a parameter of `base_parameters` has in a model without an adapter."""
    return name.replace(_BASE, ".")


@torch.no_grad()
def _merged(layer: Any, weight: Tensor) -> Tensor:
    low, high = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    return torch.addmm(weight.float(), high.float(), low.float(), alpha=layer.scaling[_ADAPTER]).to(weight.dtype)


@contextlib.contextmanager
def without_adapter(policy: PreTrainedModel) -> Iterator[None]:
    """Disable the adapter inside the context: the policy computes as before `add_adapter`, a frozen reference for no memory.

    Use it for forward passes without a gradient. Raises ValueError for a policy without an adapter.
    """
    layers = _adapted_layers(policy)
    if not layers:
        raise ValueError("the policy has no adapter to disable")
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextlib.contextmanager
def with_merged_weights(policy: PreTrainedModel) -> Iterator[None]:
    """Compute inside the context with the weights that `merged_parameters` yields; without an adapter nothing changes.

    Adapter and merged weights differ by the rounding of the latter, which every engine has. One merged weight exists at a time.
    """
    layers = _adapted_layers(policy)
    for layer in layers:
        layer.forward = _merged_forward(layer)
    try:
        # Every entry would have layers of its own compiled.
        with torch.compiler.set_stance("force_eager") if layers else contextlib.nullcontext():
            yield
    finally:
        for layer in layers:
            del layer.forward


def _merged_forward(layer: Any) -> Callable[[Tensor], Tensor]:
    base = layer.base_layer
    return lambda states: nn.functional.linear(states, _merged(layer, base.weight), base.bias)


def _adapted_layers(policy: PreTrainedModel) -> list[Any]:
    return [policy.get_submodule(name.removesuffix(_LOW)) for name, _ in policy.named_parameters() if name.endswith(_LOW)]
