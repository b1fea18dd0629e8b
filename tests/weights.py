"""Buffers of weights for tests."""

from collections.abc import Iterable

import torch

from offbeat.common.weights.flat import WeightBuffer, make_layout


def buffer_of(named: Iterable[tuple[str, torch.Tensor]]) -> WeightBuffer:
    """Return a buffer that holds these tensors, each in its dtype."""
    tensors = dict(named)
    layout = tuple(spec for name, one in tensors.items() for spec in make_layout([(name, tuple(one.shape))], one.dtype))
    buffer = WeightBuffer(layout)
    for name, view in buffer.views():
        view.copy_(tensors[name].detach())
    return buffer
