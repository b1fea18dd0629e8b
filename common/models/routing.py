"""The experts that a mixture-of-experts model of transformers sends each token to, recorded during its forward pass."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder


class Routing(NamedTuple):
    """The decisions of the routers in one forward pass, on the CPU. Layers without a router are left out."""

    experts: Tensor
    """`[tokens, layers, top_k]` int64: the experts of each token, in no particular order; the rows of a batch are joined."""
    margins: Tensor
    """`[tokens, layers]` float32: the smallest router logit of those experts minus the largest of all others.

    Logits that change by less than half this margin choose the same experts. Negative only where a router does not choose by
    its logits alone (a bias that balances load, groups of experts).
    """
    num_experts: int
    """Number of experts in a layer."""


class RoutingRecord:
    """The routers' choices that `record_routing` gathers."""

    def __init__(self) -> None:
        self.choices: dict[nn.Module, Routing] = {}
        """Each router's choice, `experts` `[tokens, top_k]` and `margins` `[tokens]`; layers stay in running order."""

    def routing(self) -> Routing | None:
        """Return the last forward pass's routing; None for a dense model, and where routers do not return what they chose."""
        layers = list(self.choices.values())
        if not layers or len({(layer.experts.shape, layer.num_experts) for layer in layers}) > 1:
            return None
        return Routing(
            experts=torch.stack([layer.experts for layer in layers], dim=1).cpu(),
            margins=torch.stack([layer.margins for layer in layers], dim=1).cpu(),
            num_experts=layers[0].num_experts,
        )


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Record the choices of the routers of `model` while the context is open; its outputs do not change.

    Routers are the modules that transformers' models declare as the source of their `router_logits`. One that does not
    return the experts it chose beside its logits is left out: taking the largest logits would be a guess.
    """
    record = RoutingRecord()
    with ExitStack() as stack:
        for router, logits_index in routers(model).items():

            def note(module: nn.Module, inputs: Any, output: Any, logits_index: int = logits_index) -> None:
                choice = _choice(output, logits_index)
                if choice is not None:
                    record.choices[module] = choice

            stack.callback(router.register_forward_hook(note).remove)
        yield record


def routers(model: nn.Module) -> dict[nn.Module, int]:
    """Return the routers in `model` in the order of their layers, each with the index of the logits in its output."""
    routers: dict[nn.Module, int] = {}
    # A model for several modalities declares nothing itself, the models in it do.
    for owner in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        declared: Any = owner.can_record_outputs.get("router_logits", [])
        for recorder in declared if isinstance(declared, list) else [declared]:
            if isinstance(recorder, OutputRecorder):
                routers |= dict.fromkeys(_recorded_modules(owner, recorder), recorder.index)
    return routers


def _recorded_modules(owner: PreTrainedModel, recorder: OutputRecorder) -> Iterator[nn.Module]:
    within = f".{(recorder.layer_name or '').strip('.')}."
    for name, module in owner.named_modules():
        if isinstance(module, recorder.target_class) and (recorder.layer_name is None or within in f".{name}."):
            yield module


def _choice(output: Any, logits_index: int) -> Routing | None:
    """Return a router's output as a choice; None when the output does not hold exactly one tensor of integers."""
    if not isinstance(output, tuple):
        return None
    chosen = [part for part in output if isinstance(part, Tensor) and part.dtype in (torch.int32, torch.int64)]
    if len(chosen) != 1:
        return None
    logits = output[logits_index].detach().flatten(end_dim=-2).float()
    experts = chosen[0].flatten(end_dim=-2).long()
    is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, experts, True)
    lowest_chosen = logits.masked_fill(~is_chosen, torch.inf).amin(dim=-1)
    highest_other = logits.masked_fill(is_chosen, -torch.inf).amax(dim=-1)
    return Routing(experts, lowest_chosen - highest_other, logits.shape[-1])
