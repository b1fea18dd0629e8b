"""Buffers of weights for tests, and updates of engines with them."""

from collections.abc import Iterable

import torch
from torch import nn

from offbeat.actor.engines.engine import Engine
from offbeat.common.weights.flat import WeightBuffer, make_layout


def buffer_of(named: Iterable[tuple[str, torch.Tensor]]) -> WeightBuffer:
    """Return a buffer that holds these tensors, each in its dtype."""
    tensors = dict(named)
    layout = tuple(spec for name, one in tensors.items() for spec in make_layout([(name, tuple(one.shape))], one.dtype))
    buffer = WeightBuffer(layout)
    for name, view in buffer.views():
        view.copy_(tensors[name].detach())
    return buffer


@torch.no_grad()
def plain_logprobs(model: nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Return the log-probs of a completion's tokens, by one forward pass in float32 from the logits on."""
    ids = torch.tensor([prompt + completion])
    logprobs = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]


def check_updates(engine: Engine, model: nn.Module, token_ids: list[int], *, times: float, atol: float) -> None:
    """Load three versions of the weights, each so many `times` the one before, and compare each score with the model's."""
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    before = torch.zeros(len(token_ids) - 1)
    for version in range(3):
        engine.load_weights(buffer_of(weights.items()), version, recompute_kv=True)
        expected = plain_logprobs(model, token_ids[:1], token_ids[1:])
        torch.testing.assert_close(torch.as_tensor(engine.score(token_ids).logprobs), expected, atol=atol, rtol=0)
        assert (expected - before).abs().max() > max(atol, 0.01), "an update that is not loaded would show"
        before = expected
        for weight in weights.values():
            weight.mul_(times)
