"""The newest generation of flash attention that a GPU can run, in place of the one that torch has built in."""

import logging

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel

from offbeat.learner.policy.packed_attention import attention_heads

logger = logging.getLogger(__name__)

GENERATIONS = {9: ("FA3", "FA4"), 10: ("FA4",)}
"""Generations that torch can be switched to, by the GPU's major compute capability, the one to be tried first in front."""


def use_newest_flash_attention(policy: PreTrainedModel, device: torch.device) -> None:
    """Switch this process to the newest flash attention that runs the policy's heads on this GPU, forward and backward.

    FA3 is in the module `flash_attn_interface`, FA4 in `flash_attn.cute`. Without them, and on a CPU, torch's own stays.
    """
    if device.type != "cuda" or policy.dtype not in (torch.bfloat16, torch.float16):
        return
    refusals: list[str] = []
    for name in GENERATIONS.get(torch.cuda.get_device_capability(device)[0], ()):
        try:
            _switch(name, policy, device)
        except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            refusals.append(f"{name} cannot be used: {type(error).__name__}: {error}")
        else:
            logger.info("flash attention: %s", name)
            return
    logger.info("flash attention: torch's own (%s)", "; ".join(refusals) or "this GPU has no newer one")


def _switch(name: str, policy: PreTrainedModel, device: torch.device) -> None:
    """Switch to a generation; switch back where it raises for the policy's heads."""
    activate_flash_attention_impl(name)
    works = False
    try:
        _try_heads(policy, device)
        works = True
    finally:
        if not works:
            restore_flash_attention_impl()


def _try_heads(policy: PreTrainedModel, device: torch.device) -> None:
    """Attend once with the sizes of the policy's heads, and with the arguments that packed attention uses."""
    heads = attention_heads(policy)
    query, key, value = (
        torch.ones(4, count, heads.head_size, device=device, dtype=policy.dtype, requires_grad=True)
        for count in (heads.num_heads, heads.num_key_heads, heads.num_key_heads)
    )
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=device)
    attended = varlen_attn(query, key, value, offsets, offsets, 4, 4, window_size=(-1, 0), enable_gqa=True)
    assert isinstance(attended, torch.Tensor)
    attended.sum().backward()
    torch.cuda.synchronize(device)
