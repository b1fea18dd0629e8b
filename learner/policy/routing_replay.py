"""Routing replay: the routers of a mixture of experts are forced to given experts, with weights of their own."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offbeat.common.errors import SettingError
from offbeat.common.models.routing import record_routing, routers
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packing import pack
from offbeat.learner.policy.process_group import gather_tensors


class RoutingReplay:
    """The routers of a policy, which choose the experts given to `force` until it is called again; no effect without routers.

    A chosen expert has the weight that the router's current logits give it, so gradients reach the router as without replay.
    Source: routing replay, section 5.3 of GSPO (https://arxiv.org/abs/2507.18071).
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._experts: Tensor | None = None
        self._places: Tensor | None = None
        self._num_slots = torch.zeros(2, dtype=torch.float64)
        """Slots whose expert was forced, and those of them for which the routers would have chosen another one."""
        self._num_layers = 0
        for layer, router in enumerate(routers(policy)):
            router.forward = self._replaying(layer, router.forward)
            self._num_layers += 1

    def force(self, experts: Tensor | None, *, places: Tensor | None = None) -> None:
        """Choose these experts in every pass from now on; None: let the routers choose.

        `experts` `[tokens, layers, top_k]`, integers: for each input of the pass, in each layer with a router, distinct experts
        in any order. A backward pass may run routers again, so the experts have to stay until it has ended. Metrics are of the
        tokens at `places`; None for all.
        """
        self._places = places
        self._experts = None if experts is None else experts.long()

    def forget(self) -> None:
        """Let the routers choose, and count from 0."""
        self._experts = None
        self._num_slots = torch.zeros_like(self._num_slots)

    @contextlib.contextmanager
    def note(self) -> Iterator[Callable[[], Tensor | None]]:
        """Note what the routers choose while the context is open; yield a function that returns it as `force` takes it."""
        if not self._num_layers:
            yield lambda: None
            return
        with record_routing(self._policy) as record:

            def noted() -> Tensor | None:
                routing = record.routing()
                return None if routing is None else routing.experts

            yield noted

    def take_metrics(self, *, num_alike: int) -> dict[str, float]:
        """Return `loss/replay_changed_slots` of all ranks since the last call; empty where there is nothing to replay.

        Every rank calls it; of `num_alike` neighboring ranks that ran the same tokens one counts.
        """
        if not self._num_layers:
            return {}
        forced, changed = gather_tensors(self._num_slots, num_alike=num_alike).sum(dim=0).tolist()
        self._num_slots = torch.zeros_like(self._num_slots)
        return {"loss/replay_changed_slots": changed / forced} if forced else {}

    def _replaying(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replay(*args: Any, **kwargs: Any) -> Any:
            if self._experts is None:
                return forward(*args, **kwargs)
            with _GivenExperts(self._experts[:, layer]) as given:
                output = forward(*args, **kwargs)
            if given.changed is None:
                raise RuntimeError(f"router {layer} did not choose among the experts of {len(self._experts)} tokens")
            changed = given.changed if self._places is None else given.changed[self._places]
            self._num_slots += torch.tensor([changed.numel(), int(changed.sum())])
            return output

        return replay


class _Chosen(NamedTuple):
    """The result of `torch.topk`."""

    values: Tensor
    indices: Tensor


class _GivenExperts(TorchFunctionMode):
    """While it is entered, the `topk` of a router's scores returns given experts and their scores.

    A router's scores are `[tokens, experts]`, and it chooses `top_k` of them. Routers that choose groups of experts first call
    `topk` on tensors of other shapes.
    """

    def __init__(self, experts: Tensor) -> None:
        self._experts = experts
        self.changed: Tensor | None = None
        """Slots whose expert the router would not have chosen, `[tokens, top_k]` bool; None before it has."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or result[1].shape != self._experts.shape:
            return result
        experts = self._experts.to(result[1].device)
        self.changed = (experts[..., :, None] != result[1][..., None, :]).all(dim=-1)
        return _Chosen(args[0].gather(-1, experts), experts)


@torch.no_grad()
def make_replay(module: CompletionLogprobs, setting: Literal["off", "recomputed", "sampled"]) -> RoutingReplay:
    """Return the replay of a policy that `loss.routing_replay` asks for, after a trial on a few tokens.

    Raises `SettingError` for a policy whose routers cannot be forced.
    """
    if setting == "off":
        return RoutingReplay(nn.Module())
    replay = RoutingReplay(module.policy)
    device = module.head.output_layer.weight.device
    ids = np.arange(8) % module.policy.config.get_text_config().vocab_size
    packed = pack([(ids[:1], [ids[1:]])]).to(device)
    with module.whole_packs(), record_routing(module.policy) as record:
        module(*packed.inputs, 1.0)
        own = record.routing()
        if own is not None:
            forced = (own.experts + 1) % own.num_experts
            replay.force(forced)
            with contextlib.suppress(RuntimeError):
                module(*packed.inputs, 1.0)
            replay.forget()
            chosen = record.routing()
            if chosen is not None and torch.equal(chosen.experts.sort().values, forced.sort().values):
                return replay
    cure = 'Set it to "off". It takes a mixture of experts whose routers return their choice, such as Qwen3-MoE or Mixtral.'
    raise SettingError("loss.routing_replay", setting, "the model has no routers that can be forced to given experts", cure)
