"""Ranks that share packs compute what one rank computes, between real processes."""

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from offbeat.common.errors import SettingError
from offbeat.common.settings.library_options import check_heads
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packing import Pack, Turns, pack
from offbeat.learner.policy.sequence_parallel import SequenceGroup, join_sequence_group
from tests.forked import context

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", {}),
    "one key head": ("Qwen3", {"num_key_value_heads": 1}),
    "sliding window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "mixture of experts": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
}


def make_module(variant: str, group: SequenceGroup, *, checkpointed: bool) -> CompletionLogprobs:
    """Return a random model with a critic whose head is not 0."""
    import transformers

    family, changes = VARIANTS[variant]
    torch.manual_seed(0)
    policy = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**{**SHAPE, **changes}))
    policy.eval()
    if checkpointed:
        policy.gradient_checkpointing_enable()
        policy.train()
    module = CompletionLogprobs(policy, value_head=True, sequence_group=group)
    assert module.value_head is not None
    torch.nn.init.normal_(module.value_head.weight)
    return module


def make_packs() -> list[Pack]:
    """Return packs of 0 to 24 inputs, with each remainder of a division by four, one with fewer inputs than there are ranks."""
    random = np.random.default_rng(0)

    def tokens(length: int) -> list[int]:
        return random.integers(0, 40, length).tolist()

    packs = [pack([]), pack([(tokens(1), [tokens(1)])])]
    packs += [pack([(tokens(prompt), [tokens(length), tokens(2)])]) for prompt, length in ((1, 1), (2, 3), (3, 4), (3, 5))]
    # Two forks and a restart, by context, sampled tokens and turns to go back.
    turns = [(1, 3, 1), (2, 2, 1), (0, 4, 2), (0, 3, 4), (3, 2, 0)]
    sampled, context = (random.integers(0, 40, length, dtype=np.int32) for length in (14, 6))
    episode = Turns(sampled, context, turns)
    return [*packs, pack([(tokens(5), [tokens(4), [], tokens(7), episode]), (tokens(2), [tokens(3), tokens(6)])])]


def compute(module: CompletionLogprobs, packed: Pack) -> tuple[list[Tensor], list[Tensor]]:
    """Return log-probs, entropies and values, and the gradients of a loss that looks at whole completions."""
    outputs = module(*packed.inputs, 0.7)
    logprobs, entropies, values = outputs
    # As GSPO does: the exponential of a completion's mean.
    ratios = [part.mean().exp() for part in logprobs.split(packed.lengths) if len(part)]
    loss = torch.stack(ratios).sum() if ratios else logprobs.sum()
    loss = loss + (entropies * torch.linspace(0, 1, len(entropies))).sum() + values.square().sum()
    module.zero_grad()
    loss.backward()
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()
    ]
    return list(outputs), gradients


def run_rank(rank: int, world_size: int, store: str, variant: str, size: int, connection: Connection) -> None:
    """Send the largest differences from a single rank, of outputs and of gradients that the ranks add up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, world_size), rank=rank, world_size=world_size)
    group = join_sequence_group(size, world_size=world_size)
    assert group is not None
    packs = make_packs()
    differences: list[tuple[float, float]] = []
    for index in range(len(packs)):
        module = make_module(variant, group, checkpointed=index % 2 == 1)
        # Each group has packs of its own; their gradients are added up too.
        of_groups = [packs[(index + offset) % len(packs)] for offset in range(world_size // size)]
        outputs, gradients = compute(module, of_groups[rank // size])
        for gradient in gradients:
            dist.all_reduce(gradient)
        with module.whole_packs():
            whole = [compute(module, of_group) for of_group in of_groups]
        expected = [torch.stack(parts).sum(dim=0) for parts in zip(*(of_group for _, of_group in whole), strict=True)]
        differences.append((largest_difference(outputs, whole[rank // size][0]), largest_difference(gradients, expected)))
    connection.send(differences)
    dist.destroy_process_group()


def largest_difference(tensors: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest expected number."""
    difference, largest = 0.0, 1.0
    for one, other in zip(tensors, expected, strict=True):
        if one.numel():
            difference = max(difference, (one - other).detach().abs().max().item())
            largest = max(largest, other.detach().abs().max().item())
    return difference / largest


@pytest.mark.parametrize(
    ("variant", "world_size", "size"),
    [("one key head", 2, 2), ("sliding window", 2, 2), ("mixture of experts", 4, 2), ("dense", 4, 4)],
)
def test_ranks_that_share_packs_have_the_outputs_and_gradients_of_one(
    variant: str, world_size: int, size: int, tmp_path: Path
) -> None:
    connections = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        arguments = (rank, world_size, str(tmp_path / "store"), variant, size, theirs)
        context.Process(target=run_rank, args=arguments, daemon=True).start()
        theirs.close()
        connections.append(ours)
    for connection in connections:
        assert connection.poll(PATIENCE_S)
        for of_outputs, of_gradients in connection.recv():
            assert of_outputs < 1e-6
            assert of_gradients < 1e-6


def test_ranks_that_cannot_be_divided_into_groups_are_refused() -> None:
    with pytest.raises(SettingError, match=r"sequence_parallel_size = 2: 3 learner processes .* into groups of 2"):
        join_sequence_group(2, world_size=3)


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "arithmetic"),
    [(4, 2, 3, "2 heads of keys and values: 2 / 3"), (12, 4, 6, "4 heads of .*: 4 / 6"), (4, 2, 8, "4 heads: 4 / 8")],
)
def test_heads_that_cannot_be_divided_among_ranks_are_refused(heads: int, key_heads: int, size: int, arithmetic: str) -> None:
    with pytest.raises(SettingError, match=arithmetic):
        check_heads(size, num_heads=heads, num_key_heads=key_heads)


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(32, 8, 4), (32, 8, 16), (14, 2, 2), (3, 3, 1)])
def test_heads_that_each_rank_gets_as_many_of_are_accepted(heads: int, key_heads: int, size: int) -> None:
    check_heads(size, num_heads=heads, num_key_heads=key_heads)
