from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat.learner.policy.logprobs import ALIGNED, CompletionLogprobs, HeadSettings, _chunks, token_logprobs
from offbeat.learner.policy.packing import Pack, Turns, pack
from offbeat.protocols.payload import Turn
from tests.families import FAMILIES, make_family
from tests.trees import read_by_turns

pytestmark = pytest.mark.slow

SEQUENCES = [
    ([5, 6, 7, 8, 9], [[10, 11, 12, 13, 14, 15, 16], [17], [], [18, 19, 20]]),
    ([21, 22], [[23, 24, 25, 26, 27, 28], [29, 30]]),
]
"""Two groups, with an empty completion and one of a single token."""
TURNS = [(1, 3, 1), (2, 2, 1), (0, 4, 2), (1, 2, 1), (0, 3, 4), (3, 2, 0), (1, 1, 1)]
"""Turns by context, sampled tokens and turns to go back: two forks of turn 0 or later, one of the prompt's end, a restart."""
SYSTEM = np.arange(10, 28)
AGENTS = [
    Turns(np.array([5, 6, 7], np.int32), np.array([*SYSTEM, 30, 31, *SYSTEM, 32], np.int32), [(20, 2, 0), (19, 1, 0)]),
    Turns(np.array([8, 9], np.int32), np.array([*SYSTEM, 30, 31, 33], np.int32), [(20, 1, 0), (1, 1, 1)]),
]
"""Three sequences that begin alike, none of them with the prompt."""
WITH_TURNS: list[tuple[list[int], Any]] = [
    *SEQUENCES,
    ([31, 32, 33], [Turns(np.arange(10, 27, dtype=np.int32), np.arange(34, 42, dtype=np.int32), TURNS), [4, 5]]),
    ([34], AGENTS),
]
"""The groups above, and two with completions of several sequences."""


Head = tuple[Tensor, Tensor, Tensor]
"""Names of states, weight and bias."""


def random_head(
    *, num_tokens: int = 10, vocab_size: int = 7, hidden_size: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[Head, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = (
        torch.randn(num_tokens, hidden_size, generator=generator).to(dtype).requires_grad_(),
        torch.randn(vocab_size, hidden_size, generator=generator).to(dtype).requires_grad_(),
        torch.randn(vocab_size, generator=generator).to(dtype).requires_grad_(),
    )
    return head, torch.randint(vocab_size, (num_tokens,), generator=generator)


def exact(states: Tensor, weight: Tensor, bias: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies in float64, for autograd."""
    all_logprobs = ((states.double() @ weight.double().T + bias.double()) / temperature).log_softmax(-1)
    entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(-1, token_ids[:, None]).squeeze(-1), entropies


def test_logprobs_are_of_the_given_tokens_at_the_temperature():
    # One state, two tokens: logits (1, 3) at temperature 2 are (0.5, 1.5): p = (0.26894, 0.73106), H = 0.58220.
    states, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [3.0]])
    logprobs, entropies = token_logprobs(states, weight, None, torch.tensor([0, 1]), HeadSettings(2.0, with_entropy=True))
    torch.testing.assert_close(logprobs, torch.tensor([-1.31326, -0.31326]), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, torch.tensor([0.58220, 0.58220]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk_columns", [1, 3, 6, 7, 1000])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_are_exact_whatever_the_chunk(chunk_columns, with_entropy):
    inputs, token_ids = random_head()
    logprobs, entropies = token_logprobs(
        *inputs, token_ids, HeadSettings(0.7, max_chunk_logits=chunk_columns * 10, with_entropy=with_entropy)
    )
    expected, expected_entropies = exact(*inputs, token_ids, 0.7)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)
    scale = torch.arange(10.0) - 4
    loss, expected_loss = (logprobs * scale).sum(), (expected * scale).sum()
    if entropies is not None:
        torch.testing.assert_close(entropies.double(), expected_entropies, rtol=1e-6, atol=1e-6)
        loss, expected_loss = loss + (entropies * scale**2).sum(), expected_loss + (expected_entropies * scale**2).sum()
    assert (entropies is not None) == with_entropy
    torch.testing.assert_close(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected_loss, inputs), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 5000, 151_936])
@pytest.mark.parametrize("num_tokens", [1, 1000, 16_384, 200_000])
def test_chunks_cover_the_vocabulary_and_start_where_a_gpu_multiplies_fast(vocab_size, num_tokens):
    chunks = list(_chunks(torch.empty(vocab_size, 8, device="meta"), num_tokens, 2**24))
    assert [index for chunk in chunks for index in range(chunk.start, chunk.stop)] == list(range(vocab_size))
    assert all(num_tokens * (chunk.stop - chunk.start) <= 2**24 for chunk in chunks)
    if 2**24 // num_tokens >= ALIGNED:
        assert all(chunk.start % ALIGNED == 0 for chunk in chunks)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_capped_logits_have_their_values_and_gradients(with_entropy):
    inputs, token_ids = random_head()
    states, weight, bias = inputs
    settings = HeadSettings(0.7, max_chunk_logits=30, with_entropy=with_entropy, softcap=1.5)
    logprobs, entropies = token_logprobs(*inputs, token_ids, settings)
    # 7 tokens of the vocabulary, whose capped logits an identity passes on.
    capped = 1.5 * torch.tanh((states.double() @ weight.double().T + bias.double()) / 1.5)
    expected, expected_entropies = exact(capped, torch.eye(7), torch.zeros(7), token_ids, 0.7)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)
    scale = torch.arange(10.0) - 4
    loss, expected_loss = (logprobs * scale).sum(), (expected * scale).sum()
    if entropies is not None:
        loss, expected_loss = loss + (entropies * scale**2).sum(), expected_loss + (expected_entropies * scale**2).sum()
    torch.testing.assert_close(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected_loss, inputs), rtol=1e-5, atol=1e-5
    )


def test_the_entropy_alone_has_its_gradient():
    inputs, token_ids = random_head()
    _, entropies = token_logprobs(*inputs, token_ids, HeadSettings(1.3, max_chunk_logits=30, with_entropy=True))
    _, expected = exact(*inputs, token_ids, 1.3)
    assert entropies is not None
    torch.testing.assert_close(
        torch.autograd.grad(entropies.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), rtol=1e-5, atol=1e-5
    )


class LargestTensor(TorchDispatchMode):
    """A dispatch mode that records the size of the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_a_weight_that_is_not_trained_costs_no_gradient_and_the_states_get_theirs():
    (states, weight, bias), token_ids = random_head(vocab_size=512)
    frozen = weight.detach(), bias.detach()
    logprobs, _ = token_logprobs(states, *frozen, token_ids, HeadSettings(1.0, max_chunk_logits=300))
    with LargestTensor() as largest:
        (gradient,) = torch.autograd.grad(logprobs.sum(), [states])
    (expected,) = torch.autograd.grad(exact(states, *frozen, token_ids, 1.0)[0].sum(), [states])
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    assert largest.numel <= 300


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tensor_is_larger_than_a_chunk_of_logits_forward_or_backward(with_entropy):
    # All logits would be 64 * 512 = 32768 numbers, a chunk is 2048; the weight's gradient is 512 * 4.
    (states, weight, bias), token_ids = random_head(num_tokens=64, vocab_size=512)
    with LargestTensor() as largest:
        logprobs, entropies = token_logprobs(
            states, weight, bias, token_ids, HeadSettings(0.7, max_chunk_logits=2048, with_entropy=with_entropy)
        )
        (logprobs.sum() + (0.0 if entropies is None else entropies.sum())).backward()
    assert weight.grad is not None
    assert largest.numel == 2048


def test_bfloat16_states_give_float32_logprobs_and_bfloat16_gradients():
    inputs, token_ids = random_head(dtype=torch.bfloat16)
    logprobs, _ = token_logprobs(*inputs, token_ids, HeadSettings(1.0, max_chunk_logits=30))
    expected, _ = exact(*inputs, token_ids, 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=0.05)
    gradients = torch.autograd.grad(logprobs.sum(), inputs)
    for gradient, exact_gradient in zip(gradients, torch.autograd.grad(expected.sum(), inputs), strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient, exact_gradient, rtol=0.05, atol=0.05)


def test_a_float32_head_on_bfloat16_states_rounds_no_logit():
    inputs, token_ids = random_head(hidden_size=64, dtype=torch.bfloat16)
    expected, expected_entropies = exact(*inputs, token_ids, 1.0)
    rounded, _ = token_logprobs(*inputs, token_ids, HeadSettings(1.0))
    logprobs, entropies = token_logprobs(
        *inputs, token_ids, HeadSettings(1.0, max_chunk_logits=30, fp32_head=True, with_entropy=True)
    )
    assert (rounded - expected).abs().max() > 1e-3
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-5)
    assert entropies is not None
    torch.testing.assert_close(entropies.double(), expected_entropies, rtol=1e-6, atol=1e-5)
    gradients = torch.autograd.grad(logprobs.sum(), inputs)
    # bfloat16 keeps 8 bits; nothing but the last rounding is in them.
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), inputs), rtol=2**-8, atol=1e-5)


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def run(module: CompletionLogprobs, packed: Pack, temperature: float = 0.8) -> Any:
    """Return the log-probs of `CompletionLogprobs` for a pack."""
    return module(packed.token_ids, packed.position_ids, packed.predictors, packed.targets, packed.spans, temperature)


def plain_logprobs(policy, temperature: float = 0.8) -> Tensor:
    """Return log-probs of all sampled tokens, each turn alone with what it has read, from transformers alone."""
    parts = []
    for prompt, completions in WITH_TURNS:
        for completion in completions:
            for read, sampled in reads_of(prompt, completion):
                logits = policy(input_ids=torch.tensor([[*read, *sampled]])).logits[0, len(read) - 1 : -1]
                parts.append(
                    (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(sampled).long()[:, None]).squeeze(-1)
                )
    return torch.cat(parts)


def reads_of(prompt: list[int], completion: Any) -> list[tuple[list[int], list[int]]]:
    if not isinstance(completion, Turns):
        return [(prompt, completion)]
    return read_by_turns(prompt, [Turn(*turn) for turn in completion.turns], completion.context_ids, completion.token_ids)


@pytest.fixture(params=["qwen3", "qwen3_moe", "llama", "windowed_mistral", "Qwen3.5-MoE"])
def folder(request, tiny_model, tiny_moe_model, tmp_path_factory):
    """A model. Mistral's layers see 3 tokens back, fewer than a completion with its prompt has. Qwen3.5 is not packed."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    if request.param in FAMILIES:
        folder = tmp_path_factory.mktemp("family")
        make_family(folder, request.param, tiny_model)
        return folder

    if request.param in ("qwen3", "qwen3_moe"):
        return tiny_model if request.param == "qwen3" else tiny_moe_model
    shape: dict[str, Any] = {
        "vocab_size": 44,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    folder = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if request.param == "llama":
            LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
        else:
            MistralForCausalLM(MistralConfig(**shape, sliding_window=3)).save_pretrained(folder)
    return folder


def parameter_gradients(model) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_logprobs_and_gradients_are_those_of_each_turn_alone(folder, checkpointing):
    policy, reference = load(folder), load(folder)
    if checkpointing:
        from transformers.modeling_layers import GradientCheckpointingLayer

        policy.gradient_checkpointing_enable()
        for layer in policy.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = True
    expected = plain_logprobs(reference)
    logprobs, _, _ = run(CompletionLogprobs(policy, max_chunk_logits=100), pack(WITH_TURNS))
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6 if policy.config.model_type == "llama" else 1e-5)
    scale = torch.randn(len(expected), generator=torch.Generator().manual_seed(2))
    (logprobs * scale).sum().backward()
    (expected * scale).sum().backward()
    gradients, expected_gradients = parameter_gradients(policy), parameter_gradients(reference)
    largest = max(gradient.abs().max().item() for gradient in expected_gradients.values())
    assert largest > 0.1
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5 * largest)


def test_a_completion_changes_no_bit_of_anothers_logprobs(tiny_model):
    module = CompletionLogprobs(load(tiny_model))
    changed = [(prompt, [list(completion) for completion in completions]) for prompt, completions in SEQUENCES]
    changed[0][1][0][:3] = [40, 41, 42]
    with torch.no_grad():
        before, after = (run(module, pack(sequences))[0] for sequences in (SEQUENCES, changed))
    assert not torch.isclose(before[:7], after[:7]).any()
    assert torch.equal(before[7:], after[7:])


def test_without_completions_there_are_no_logprobs_and_every_gradient_is_zero(tiny_untied_model):
    module = CompletionLogprobs(load(tiny_untied_model), value_head=True)
    logprobs, entropies, values = run(module, pack([]))
    assert logprobs.shape == entropies.shape == values.shape == (0,)
    (logprobs.sum() + entropies.sum() + values.sum()).backward()
    for gradient in parameter_gradients(module).values():
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_the_value_of_a_token_is_of_the_state_before_it(tiny_model):
    policy = load(tiny_model)
    prompt, completion = [5, 6, 7], [8, 9]
    with torch.no_grad():
        states = policy.model(input_ids=torch.tensor([[*prompt, *completion]])).last_hidden_state[0]
    module = CompletionLogprobs(policy, value_head=True)
    assert module.value_head is not None
    assert run(module, pack([(prompt, [completion])]))[2].tolist() == [0.0, 0.0]
    with torch.no_grad():
        module.value_head.weight.copy_(torch.linspace(-1, 1, 128)[None])
        module.value_head.bias.fill_(0.5)
        _, _, values = run(module, pack([(prompt, [completion])]))
    torch.testing.assert_close(values, states[2:4] @ torch.linspace(-1, 1, 128) + 0.5, rtol=1e-5, atol=1e-5)


def test_the_value_head_is_trained_with_the_policy_and_is_not_part_of_it(tiny_model):
    policy = load(tiny_model)
    names = [name for name, _ in policy.named_parameters()]
    module = CompletionLogprobs(policy, value_head=True)
    assert [name for name, _ in policy.named_parameters()] == names
    assert {"value_head.weight", "value_head.bias"} < {name for name, _ in module.named_parameters()}
    run(module, pack(SEQUENCES))[2].sum().backward()
    assert module.value_head is not None and module.value_head.weight.grad is not None
    assert module.value_head.weight.grad.abs().max() > 0


def test_the_output_layer_must_be_linear(tiny_model):
    policy = load(tiny_model)
    policy.lm_head = torch.nn.Identity()
    with pytest.raises(TypeError, match="Identity; only a plain Linear"):
        CompletionLogprobs(policy)
