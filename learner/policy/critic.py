"""A critic with a trunk of its own: a second network that says the value of each state, and its optimizer.

A critic on the policy's trunk is the value head of `CompletionLogprobs`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from offbeat.common.errors import SettingError
from offbeat.common.models.families import plain_attention, set_attention
from offbeat.common.settings.config import Config
from offbeat.learner.policy.loading import load_critic
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packing import Pack, PackedImages, Span, unpack
from offbeat.learner.policy.zero import deepspeed_config, make_engine, take_step

_ATTENTION = ("attn", "attention")
"""Ends of the names that transformers gives to attention layers, such as `self_attn`."""


class CompletionValues(nn.Module):
    """The values of a pack's completion tokens, each that of the state before its token."""

    def __init__(self, network: CompletionLogprobs) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, predictors: Tensor, spans: tuple[Span, ...], images: PackedImages | None
    ) -> Tensor:
        """Return the values of a `learner.policy.packing.Pack`, `[num_completion_tokens]` float32."""
        head = self.network.value_head
        assert head is not None, "a critic has a value head"
        states = self.network.states(token_ids, position_ids, spans, images)
        return head(states.index_select(0, predictors)).squeeze(-1).float()


class Critic:
    """The critic of this rank. Every rank calls every method, in the same order."""

    def __init__(self, config: Config, packing_obstacle: str | None) -> None:
        """Load the model at `model.path`, whose packs or whole rows are computed as the policy's are."""
        network = load_critic(config)
        network.packing_obstacle = packing_obstacle
        if packing_obstacle is not None:
            # The network packs until a trial pass fails; only the policy makes one.
            set_attention(network.policy, plain_attention(network.policy))
        # It is not a part of the values; where it is tied to the embeddings, these are trained.
        if network.head.output_layer.weight is not network.policy.get_input_embeddings().weight:
            network.head.requires_grad_(False)
        if config.critic.freeze_attention:
            for parameter in attention_parameters(network.policy, config.model.path):
                parameter.requires_grad_(False)
        self.module = CompletionValues(network)
        self._max_grad_norm = config.train.max_grad_norm
        self.engine = make_engine(self.module, deepspeed_config(config.train, config.model.dtype), config.train)

    @torch.no_grad()
    def run(self, packed: Pack) -> Tensor:
        """Return the values of a pack's tokens, `[rows, tokens]`, 0 on padding."""
        return _run(self.module, packed)

    def run_trained(self, packed: Pack) -> Tensor:
        """Return the same for a backward pass of `engine`."""
        return _run(self.engine, packed)

    def step(self, learning_rate: float) -> float:
        """Take the optimizer step; return the norm of the gradient before clipping."""
        return take_step(self.engine, learning_rate, max_grad_norm=self._max_grad_norm)


def _run(network: nn.Module, packed: Pack) -> Tensor:
    token_ids, position_ids, predictors, _, spans = packed.inputs
    return unpack(network(token_ids, position_ids, predictors, spans, packed.images), packed.lengths)


def attention_parameters(policy: nn.Module, path: str) -> Iterator[nn.Parameter]:
    """Yield the parameters of the model's attention layers; raise `SettingError` where no layer has such a name."""
    found = [
        parameter
        for name, parameter in policy.named_parameters()
        if any(part.endswith(_ATTENTION) for part in name.split(".")[:-1])
    ]
    if not found:
        problem = f"no layer of the model {path!r} has a name that ends in {' or '.join(_ATTENTION)}"
        raise SettingError("critic.freeze_attention", True, problem, "Set it to false.")
    yield from found
