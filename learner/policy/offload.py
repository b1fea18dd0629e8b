"""Activation offload: what a forward pass keeps for its backward pass, in the memory of the host."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

Packed = Tensor | tuple[torch.device, Tensor]
"""A tensor that stays where it is, or its device and its copy on the host."""


def kept_on_host() -> AbstractContextManager[None]:
    """Keep the activations of a forward pass in pinned host memory; the backward pass fetches each as it needs it.

    Of a layer that is computed again only its input is kept. Parameters stay where they are.
    """
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device)


def _to_host(tensor: Tensor) -> Packed:
    if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    # The stream that copies back is the same, so it waits for this copy.
    host.copy_(tensor, non_blocking=tensor.is_cuda)
    return tensor.device, host


def _to_device(packed: Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=True)
