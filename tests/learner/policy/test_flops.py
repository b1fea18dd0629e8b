"""Operations of a step: counted by hand, and as torch counts the products that were really made."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from offbeat.learner.policy import flops as peak
from offbeat.learner.policy.flops import FlopCounter, peak_flops, published_flops
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.lora import add_adapter
from offbeat.learner.policy.packing import Pack, Turns, pack

PACK = pack([([4, 5, 6], [[7, 8, 9], [7]]), ([4, 5], [[6, 7, 8, 9, 10]])])
"""3 + 2 inputs of the first group, 2 + 4 of the second; 3 + 1 + 5 completion tokens."""
NUM_INPUTS, NUM_TARGETS = 11, 9
PAIRS = (1 + 2 + 3) + (4 + 5) + (1 + 2) + (3 + 4 + 5 + 6)
"""Queries times the keys that each sees: two prompts, and two completions after them."""


def make_policy(**settings) -> CompletionLogprobs:
    """Return a policy of one layer or more: hidden 8, two heads of 4, one key-value head, MLP of 6, 11 tokens."""
    shape = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 6, "vocab_size": 11}
    return CompletionLogprobs(Qwen2ForCausalLM(Qwen2Config(**{**shape, "num_hidden_layers": 1, **settings})))


def products_made(module: CompletionLogprobs, packed: Pack) -> int:
    """Return the operations of all matrix products of a forward and a backward pass, those of attention left out."""
    # torch counts the product that is added in place only when told to.
    added = {torch.ops.aten.addmm_: lambda _, left, right, **others: 2 * left[0] * left[1] * right[1]}
    counter = FlopCounterMode(display=False, custom_mapping=added)
    with counter:
        logprobs, _, _ = module(*packed.inputs, 1.0)
        logprobs.sum().backward()
    return sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))


def attention_flops(packed: Pack, *, query_size: int, num_layers: int) -> float:
    """Return the operations of attention, forward and backward: six products of each query with each key that it sees."""
    pairs = sum(span.prefix_length + place + 1 for span in packed.spans for place in range(span.length))
    return 6 * 2 * query_size * num_layers * pairs


def test_a_dense_step_is_the_sum_of_its_products():
    layer = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 6  # queries, keys, values; output; gated MLP
    layers, attention, head = 2 * NUM_INPUTS * layer, 2 * 2 * 8 * PAIRS, 2 * NUM_TARGETS * 8 * 11
    counter = FlopCounter(make_policy(), checkpointing=False)
    assert counter.count_forward(PACK) == layers + attention + head
    assert counter.count_training(PACK) == (3 * (layers + attention + head), head)
    checkpointed = FlopCounter(make_policy(), checkpointing=True)
    assert checkpointed.count_training(PACK) == (3 * (layers + attention + head), head + layers + attention)


def test_what_sequences_of_an_episode_share_is_counted_once():
    # Behind a prompt of 3: 2 sampled, then a context of 1 and 2 sampled; from the end of the first turn, 3 sampled.
    completion = Turns(np.arange(1, 8, dtype=np.int32), np.array([9], dtype=np.int32), [(0, 2, 1), (1, 2, 1), (0, 3, 2)])
    forked = pack([([4, 5, 6], [completion])])
    pairs = (1 + 2 + 3) + (4 + 5 + 6 + 7) + (6 + 7)
    num_inputs, num_targets = 3 + 4 + 2, 7
    layers = 2 * num_inputs * (8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 6)
    expected = layers + 2 * 2 * 8 * pairs + 2 * num_targets * 8 * 11
    assert FlopCounter(make_policy(), checkpointing=False).count_forward(forked) == expected


def test_a_window_bounds_the_keys_of_its_layers_alone():
    types = ["sliding_attention", "full_attention"]
    windowed = make_policy(num_hidden_layers=2, layer_types=types, sliding_window=3, use_sliding_window=True)
    difference = [
        FlopCounter(module, checkpointing=False).count_forward(PACK) for module in (make_policy(num_hidden_layers=2), windowed)
    ]
    in_window = (1 + 2 + 3) + (3 + 3) + (1 + 2) + (3 + 3 + 3 + 3)
    assert difference[0] - difference[1] == 2 * 2 * 8 * (PAIRS - in_window)


@pytest.mark.parametrize("tied", [True, False])
def test_counts_are_the_products_made(tiny_model: Path, tiny_untied_model: Path, tied: bool):
    module = CompletionLogprobs(AutoModelForCausalLM.from_pretrained(tiny_model if tied else tiny_untied_model))
    flops = FlopCounter(module, checkpointing=False).count_training(PACK)
    attention = attention_flops(PACK, query_size=128, num_layers=2)
    assert products_made(module, PACK) == flops.model - attention + flops.recomputed


def test_of_a_mixture_the_experts_that_a_token_is_sent_to_count(tiny_moe_model: Path):
    module = CompletionLogprobs(AutoModelForCausalLM.from_pretrained(tiny_moe_model, experts_implementation="eager"))
    flops = FlopCounter(module, checkpointing=False).count_training(PACK)
    attention = attention_flops(PACK, query_size=128, num_layers=2)
    assert products_made(module, PACK) == flops.model - attention + flops.recomputed


def test_frozen_matrices_have_no_gradient_of_their_own(tiny_model: Path):
    policy = AutoModelForCausalLM.from_pretrained(tiny_model)
    add_adapter(policy, rank=4, alpha=8, target_modules=())
    module = CompletionLogprobs(policy)
    flops = FlopCounter(module, checkpointing=False).count_training(PACK)
    made = products_made(module, PACK)
    # The gradients of the first layer's input are not needed: queries, keys and values, and their adapters.
    not_needed = 2 * NUM_INPUTS * (128 * (128 + 64 + 64) + 3 * 4 * 128)
    attention = attention_flops(PACK, query_size=128, num_layers=2)
    assert made == flops.model - attention - not_needed + flops.recomputed


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_published_peak_is_that_of_the_whole_name(name: str, flops: float | None):
    assert published_flops(name) == flops


def test_a_peak_without_a_data_sheet_is_the_fastest_product(monkeypatch: pytest.MonkeyPatch):
    # A clock by which products take 0.02, 0.01 and 0.03 s, and reading it takes none.
    now = iter([0.0, 0.0, 0.02, 0.02, 0.03, 0.03, 0.06, 0.06])
    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    measured = peak_flops.__wrapped__(torch.device("cpu"), torch.float32)
    assert measured == pytest.approx(2 * 512**3 / 0.01)
