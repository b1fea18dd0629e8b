import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offbeat.learner.policy import packed_attention as packed_attention_module
from offbeat.learner.policy.packed_attention import ATTENTION_NAME, PlacedSpans, Shape, find_packing_obstacle, packed_attention
from offbeat.learner.policy.packing import Span, Turns, pack

pytestmark = pytest.mark.slow

PROMPTS_AND_LENGTHS = (
    ((3, (5, 2, 1)),),
    ((6, (2, 3)),),
    ((1, (0, 1)), (4, (9, 4)), (2, ())),
)
"""Prompt lengths with completion lengths; prompts both longer and shorter than their completions."""
WITH_TURNS = ((3, (5, ((1, 3, 1), (2, 2, 1), (0, 4, 2), (1, 2, 1), (0, 3, 4), (3, 2, 0), (1, 1, 1)))),)
"""A plain completion, and one of turns: by context, sampled tokens and turns to go back; two forks and a restart."""


def make_spans(lengths) -> tuple[Span, ...]:
    return pack([([1] * prompt, [make_completion(one) for one in completions]) for prompt, completions in lengths]).spans


def make_completion(lengths: int | tuple[tuple[int, int, int], ...]) -> list[int] | Turns:
    if isinstance(lengths, int):
        return [1] * lengths
    sampled, context = (np.ones(sum(turn[part] for turn in lengths), dtype=np.int32) for part in (1, 0))
    return Turns(sampled, context, lengths)


def visible(spans: tuple[Span, ...], window: int | None) -> Tensor:
    """Return the visible keys `[inputs, inputs]` bool, from each input's span, its prefix and position."""
    prefixes, owners, positions = [], [], []
    for span in spans:
        for offset in range(span.length):
            prefixes.append([index for part in span.prefix for index in part])
            owners.append(span.start)
            positions.append(span.prefix_length + offset)
    allowed = torch.zeros(len(owners), len(owners), dtype=torch.bool)
    for row in range(len(owners)):
        for column in range(len(owners)):
            related = owners[column] == owners[row] or column in prefixes[row]
            distance = positions[row] - positions[column]
            allowed[row, column] = related and 0 <= distance < (window or math.inf)
    return allowed


def dense_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scaling: float) -> Tensor:
    """Return attention `[1, inputs, heads, head_size]` from the whole matrix of scores."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = (query @ key.mT * scaling).masked_fill(~allowed, -math.inf)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


Inputs = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""


def random_inputs(num_inputs: int, dtype: torch.dtype, device: str = "cpu", head_size: int = 8) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def random(num_heads: int) -> Tensor:
        return torch.randn(1, num_heads, num_inputs, head_size, generator=generator).to(device, dtype).requires_grad_()

    return random(4), random(2), random(2)


def attend(spans: tuple[Span, ...], inputs: Inputs, *, window: int | None, scaling: float) -> Tensor:
    placed = PlacedSpans(spans, inputs[0].device)
    output, weights = packed_attention(
        nn.Identity(), *inputs, None, scaling=scaling, sliding_window=window, placed_spans=placed, is_causal=True
    )
    assert weights is None
    return output


@pytest.mark.parametrize("square_keys", [0, 1024])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", [*PROMPTS_AND_LENGTHS, WITH_TURNS])
def test_attention_is_that_of_the_whole_matrix_in_value_and_gradient(
    monkeypatch: pytest.MonkeyPatch, lengths, window, square_keys: int
):
    monkeypatch.setattr(packed_attention_module, "SQUARE_KEYS", square_keys)
    spans = make_spans(lengths)
    allowed = visible(spans, window)
    inputs = random_inputs(len(allowed), torch.float64)
    output = attend(spans, inputs, window=window, scaling=0.3)
    expected = dense_attention(*inputs, allowed, 0.3)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad((output * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        rtol=1e-9,
        atol=1e-11,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", [*PROMPTS_AND_LENGTHS, WITH_TURNS])
def test_on_a_gpu_in_bfloat16_attention_is_that_of_the_whole_matrix_in_value_and_gradient(lengths, window):
    spans = make_spans(lengths)
    allowed = visible(spans, window).cuda()
    inputs = random_inputs(len(allowed), torch.bfloat16, "cuda", head_size=64)
    output = attend(spans, inputs, window=window, scaling=0.125)
    query, key, value = doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = dense_attention(query, key, value, allowed, 0.125)
    torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)
    gradients = torch.autograd.grad(output.float().sum(), inputs)
    for gradient, exact in zip(gradients, torch.autograd.grad(expected.sum(), doubles), strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=0.03, atol=0.03)


def test_a_kernel_for_many_lengths_finds_a_prompts_keys_once_for_each_completion():
    placed = PlacedSpans((Span(0, 2), Span(2, 3, (range(2),)), Span(5, 1, (range(2),))), torch.device("cpu")).in_line
    assert placed.key_indices.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5]
    assert placed.query_offsets.tolist() == [0, 2, 5, 6]
    assert placed.key_offsets.tolist() == [0, 2, 7, 10]
    assert placed.query_offsets.dtype == placed.key_offsets.dtype == torch.int32
    assert (placed.max_queries, placed.max_keys) == (3, 5)


def test_a_kernel_for_one_length_gets_each_spans_own_queries():
    spans = (Span(0, 2), Span(2, 3, (range(2),)), Span(5, 1, (range(2),)), Span(6, 3, (range(2),)))
    placed = PlacedSpans(spans, torch.device("cpu")).by_shape
    assert placed.shapes == (Shape(1, 2, 2), Shape(2, 3, 5), Shape(1, 1, 3))
    assert placed.query_indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 5]
    assert placed.key_indices.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 6, 7, 8, 0, 1, 5]
    assert placed.results.tolist() == [0, 1, 2, 3, 4, 8, 5, 6, 7]


def test_a_kernel_for_one_length_gets_the_prompts_queries_too_where_a_square_is_less_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_attention_module, "SQUARE_KEYS", 5)
    spans = (Span(0, 2), Span(2, 3, (range(2),)), Span(5, 1, (range(2),)), Span(6, 3, (range(2),)))
    placed = PlacedSpans(spans, torch.device("cpu")).by_shape
    assert placed.shapes == (Shape(1, 2, 2), Shape(2, 5, 5), Shape(1, 1, 3))
    assert placed.query_indices.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 6, 7, 8, 5]
    assert placed.key_indices.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 6, 7, 8, 0, 1, 5]
    assert placed.query_indices[placed.results].tolist() == list(range(9))
    assert placed.results.tolist() == [0, 1, 4, 5, 6, 12, 9, 10, 11]


@pytest.mark.parametrize("setting", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"dropout": 0.1}])
def test_an_attention_with_more_to_it_is_refused(setting):
    spans = (Span(0, 2),)
    with pytest.raises(ValueError, match="no soft-capping, no attention sinks and no dropout"):
        packed_attention(
            nn.Identity(),
            *random_inputs(2, torch.float32),
            None,
            placed_spans=PlacedSpans(spans, torch.device("cpu")),
            **setting,
        )


def test_a_call_without_spans_is_refused():
    with pytest.raises(ValueError, match="without placed_spans"):
        packed_attention(nn.Identity(), *random_inputs(2, torch.float32), None)


SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_policy(config_class: str, **settings):
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**{**SHAPE, **settings})
        config.name_or_path = "the/model"
        return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("config_class", "settings"),
    [
        ("LlamaConfig", {}),
        ("Qwen2Config", {}),
        ("Qwen3Config", {}),
        ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
        ("MistralConfig", {"sliding_window": 3}),
        ("GemmaConfig", {}),
        ("Gemma3TextConfig", {"sliding_window": 3}),
    ],
)
def test_a_policy_whose_packed_logprobs_are_its_own_passes_and_stays_packed(config_class, settings, tmp_path):
    policy = make_policy(config_class, **settings)
    assert find_packing_obstacle(policy) is None
    assert policy.config._attn_implementation == ATTENTION_NAME
    policy.save_pretrained(tmp_path)
    assert ATTENTION_NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(
    ("config_class", "settings", "reason", "own"),
    [
        ("GptOssConfig", {"num_local_experts": 4}, "attention has sinks", "eager"),
        ("Gemma2Config", {}, "attention has soft-capping", "eager"),
        ("BloomConfig", {"n_head": 4}, "has an attention of its own", "eager"),
        ("Qwen3NextConfig", {"num_experts": 4}, "layers of type linear_attention", "sdpa"),
        ("MambaConfig", {}, "convolutions along the sequence", "eager"),
    ],
)
def test_a_policy_that_cannot_be_packed_keeps_its_own_attention(config_class, settings, reason, own):
    policy = make_policy(config_class, **settings)
    assert reason in (find_packing_obstacle(policy) or "")
    assert policy.config.get_text_config()._attn_implementation == own


def test_completions_that_do_not_see_their_prompts_are_noticed(monkeypatch):
    monkeypatch.setattr(
        "offbeat.learner.policy.packed_attention.PlacedSpans",
        lambda spans, device: PlacedSpans(tuple(Span(span.start, span.length) for span in spans), device),
    )
    policy = make_policy("LlamaConfig")
    assert "the log-probs of tokens differ by" in (find_packing_obstacle(policy) or "")
    assert policy.config._attn_implementation == "sdpa"
