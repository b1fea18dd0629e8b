import pytest
import torch

from learner.batching import assign_rows, collate, training_rows
from learner.logprobs import token_logprobs
from learner.losses import gspo_loss
from tests.learner.trainer_cases import make_groups


@pytest.fixture(scope="module")
def policy(tiny_model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def module(policy):
    from learner.logprobs import CompletionLogprobs

    return CompletionLogprobs(policy)


def test_logprobs_are_of_the_given_tokens_at_the_temperature():
    # One state, two tokens: logits (1, 3) at temperature 2 are (0.5, 1.5).
    logprobs = token_logprobs(
        torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [3.0]]), None, torch.tensor([0, 1]), temperature=2.0
    )
    expected = torch.tensor([0.5, 1.5]).log_softmax(0)
    torch.testing.assert_close(logprobs, expected)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 10, 1000])
def test_chunks_change_neither_logprobs_nor_gradients(chunk_tokens):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(10, 4, generator=generator, requires_grad=True)
    weight = torch.randn(7, 4, generator=generator, requires_grad=True)
    bias = torch.randn(7, generator=generator, requires_grad=True)
    token_ids = torch.randint(7, (10,), generator=generator)
    expected = ((states @ weight.T + bias) / 0.7).log_softmax(-1).gather(-1, token_ids[:, None]).squeeze(-1)
    logprobs = token_logprobs(states, weight, bias, token_ids, temperature=0.7, max_chunk_logits=chunk_tokens * 7)
    torch.testing.assert_close(logprobs, expected)
    scale = torch.arange(10.0)
    inputs = [states, weight, bias]
    torch.testing.assert_close(
        torch.autograd.grad((logprobs * scale).sum(), inputs), torch.autograd.grad((expected * scale).sum(), inputs)
    )


def test_bfloat16_states_give_float32_logprobs():
    states, weight = torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(5, 2, dtype=torch.bfloat16)
    assert token_logprobs(states, weight, None, torch.zeros(3, dtype=torch.int64), temperature=1.0).dtype == torch.float32


def test_the_entry_at_t_is_the_logprob_of_token_t_and_padding_changes_nothing(policy, module):
    rows = training_rows(make_groups(2), divide_by_std=True)
    batch = collate(rows)
    logprobs = module(batch.token_ids, batch.completion_mask, 1.0)
    assert torch.equal(logprobs[~batch.completion_mask], torch.zeros(int((~batch.completion_mask).sum())))
    for index, row in enumerate(rows):
        token_ids = batch.token_ids[index : index + 1, : row.num_tokens]
        alone = policy(input_ids=token_ids).logits[:, :-1].log_softmax(-1).gather(-1, token_ids[:, 1:, None]).flatten()
        start = len(row.prompt_token_ids)
        torch.testing.assert_close(logprobs[index, start : row.num_tokens], alone[start - 1 :], atol=1e-5, rtol=1e-5)


def test_at_ratio_one_every_token_of_a_row_has_gradient_minus_advantage_over_its_length(module):
    batch = collate(training_rows(make_groups(3), divide_by_std=True))
    with torch.no_grad():
        anchor = module(batch.token_ids, batch.completion_mask, 1.0)
    logprobs = module(batch.token_ids, batch.completion_mask, 1.0)
    result = gspo_loss(logprobs, anchor, batch.completion_mask, batch.advantages, clip_low=0.05, clip_high=0.05)
    num_completions = len(batch.advantages)
    (gradient,) = torch.autograd.grad(result.loss_sum / num_completions, logprobs)
    lengths = batch.completion_mask.sum(dim=1)
    expected = -(batch.advantages / (num_completions * lengths))[:, None] * batch.completion_mask
    assert result.statistics.log_sequence_ratio.abs().max().item() < 1e-5
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)


def gradients(module, groups, *, micro_batch_tokens, world_size):
    """Gradients of the mean loss, the micro-batches of all ranks accumulated one after the other."""
    assigned = assign_rows(
        training_rows(groups, divide_by_std=True), micro_batch_tokens=micro_batch_tokens, world_size=world_size
    )
    num_completions = sum(len(group.rollouts) for group in groups)
    module.zero_grad()
    for rows in (rows for of_rank in assigned for rows in of_rank):
        batch = collate(rows)
        result = gspo_loss(
            module(batch.token_ids, batch.completion_mask, 1.0),
            batch.behavior_logprobs,
            batch.completion_mask,
            batch.advantages,
            clip_low=0.1,
            clip_high=0.1,
        )
        (result.loss_sum / num_completions).backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


@pytest.mark.parametrize(("micro_batch_tokens", "world_size"), [(1, 1), (17, 1), (40, 3), (1000, 5), (1, 30)])
def test_micro_batches_of_any_shape_give_the_gradient_of_the_whole(module, micro_batch_tokens, world_size):
    groups = make_groups(5, seed=3)
    whole = gradients(module, groups, micro_batch_tokens=10**6, world_size=1)
    split = gradients(module, groups[::-1], micro_batch_tokens=micro_batch_tokens, world_size=world_size)
    scale = max(gradient.abs().max().item() for gradient in whole)
    assert scale > 1e-3
    torch.testing.assert_close(split, whole, rtol=0.0, atol=1e-5 * scale)


def test_a_micro_batch_without_rows_has_a_gradient_of_zero(module):
    batch = collate([])
    module.zero_grad()
    logprobs = module(batch.token_ids, batch.completion_mask, 1.0)
    gspo_loss(
        logprobs, batch.behavior_logprobs, batch.completion_mask, batch.advantages, clip_low=0.1, clip_high=0.1
    ).loss_sum.backward()
    assert all(torch.equal(parameter.grad, torch.zeros_like(parameter)) for parameter in module.parameters())
