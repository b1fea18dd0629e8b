"""Claims about `docs.study.sampler`: its log-probs are those of the weights, however rows are padded and taken out."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from docs.study.sampler import ExactSampler, Sampled
from offbeat.common.models.routing import record_routing
from tests.weights import buffer_of

pytestmark = pytest.mark.slow

PROMPTS = [np.array(ids, dtype=np.int32) for ids in ([5, 6, 7, 8, 9], [10, 11], [12])]


def sample(model: Path, *, noise: float = 0.0, num_each: int = 4, max_new_tokens: int = 24, seed: int = 3) -> list[Sampled]:
    sampler = ExactSampler(str(model), noise=noise)
    generator = torch.Generator().manual_seed(seed)
    return sampler.sample(PROMPTS, num_each=num_each, max_new_tokens=max_new_tokens, generator=generator)


def score(model: Path, prompt: np.ndarray, sampled: Sampled) -> np.ndarray:
    """Return the log-probs of a completion in a pass of its own over prompt and completion."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    token_ids = torch.from_numpy(np.concatenate([prompt, sampled.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = network(token_ids[:, :-1]).logits[0].log_softmax(-1)
    return logprobs.gather(-1, token_ids[0, 1:, None])[len(prompt) - 1 :, 0].numpy()


@pytest.fixture(scope="module")
def ending_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that ends about one completion in ten at every token, so that lengths differ."""
    folder = tmp_path_factory.mktemp("ending_model")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        # Tied: the end's logit is the product of its embedding and the last state.
        dict(model.named_parameters())["model.embed_tokens.weight"][2] *= 4
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((tiny_model / file).read_bytes())
    return folder


def test_logprobs_are_those_of_a_pass_over_each_completion(ending_model: Path) -> None:
    completions = sample(ending_model)
    lengths = {len(one.token_ids) for one in completions}
    assert len(lengths) > 3, "rows leave the batch at different steps"
    for index, one in enumerate(completions):
        expected = score(ending_model, PROMPTS[index // 4], one)
        np.testing.assert_allclose(one.behavior_logprobs, expected, atol=2e-5)


def test_a_completion_ends_with_its_first_end_token_or_is_cut(ending_model: Path) -> None:
    completions = sample(ending_model, max_new_tokens=6)
    assert {one.is_ended for one in completions} == {True, False}
    for one in completions:
        assert list(one.token_ids[:-1]).count(2) == 0
        assert (one.token_ids[-1] == 2) == one.is_ended
        assert one.is_ended or len(one.token_ids) == 6


def test_same_seed_same_completions(tiny_model: Path) -> None:
    first, second, other = sample(tiny_model), sample(tiny_model), sample(tiny_model, seed=4)
    assert [one.token_ids.tolist() for one in first] == [one.token_ids.tolist() for one in second]
    assert [one.token_ids.tolist() for one in first] != [one.token_ids.tolist() for one in other]


def test_noise_is_in_the_distribution_that_is_sampled_from(tiny_model: Path) -> None:
    """E_mu[pi / mu] = 1, and mu is over-estimated where it is sampled: the mean of log mu - log pi is KL(mu || pi) > 0."""
    sampler = ExactSampler(str(tiny_model), noise=0.5)
    noisy = sampler.sample(PROMPTS[:1], num_each=4000, max_new_tokens=1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        policy = sampler._model(torch.from_numpy(PROMPTS[0][None].astype(np.int64))).logits[0, -1].log_softmax(-1)
    log_ratio = np.array([float(policy[one.token_ids[0]]) - one.behavior_logprobs[0] for one in noisy])
    # For 41 nearly uniform tokens: KL = noise^2 / 2 (1 - 1/41), and a standard error of 0.5 / sqrt(4000) = 0.008.
    assert -log_ratio.mean() == pytest.approx(0.125, abs=0.03)
    assert np.exp(log_ratio).mean() == pytest.approx(1.0, abs=0.03)


def test_load_replaces_every_weight(tiny_model: Path, ending_model: Path) -> None:
    sampler = ExactSampler(str(tiny_model))
    theirs = dict(AutoModelForCausalLM.from_pretrained(ending_model, dtype=torch.float32).named_parameters())
    sampler.load(buffer_of(theirs.items()))
    completions = sampler.sample(PROMPTS, num_each=4, max_new_tokens=24, generator=torch.Generator().manual_seed(3))
    assert [one.token_ids.tolist() for one in completions] == [one.token_ids.tolist() for one in sample(ending_model)]


def test_weights_without_a_distribution_are_no_crash(tiny_model: Path) -> None:
    sampler = ExactSampler(str(tiny_model))
    with torch.no_grad():
        next(sampler._model.parameters()).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        sampler.sample(PROMPTS, num_each=1, max_new_tokens=2, generator=torch.Generator())


def test_texts_leave_out_special_tokens(tiny_model: Path) -> None:
    completion = Sampled(np.array([4, 5, 2], dtype=np.int32), np.zeros(3, dtype=np.float32), True)
    assert ExactSampler(str(tiny_model)).texts([completion]) == ["01"]


def test_experts_are_those_of_a_pass_over_each_completion(tiny_moe_model: Path) -> None:
    sampler = ExactSampler(str(tiny_moe_model))
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_model).eval()
    prompt = np.array([4, 5, 6], np.int32)
    completions = [
        Sampled(np.arange(7, 7 + length, dtype=np.int32), np.zeros(length, np.float32), is_ended=True) for length in (1, 4, 2)
    ]
    alone = []
    for one in completions:
        with torch.inference_mode(), record_routing(model) as record:
            model(torch.from_numpy(np.concatenate([prompt, one.token_ids[:-1]])).long()[None])
        routing = record.routing()
        assert routing is not None
        alone.append(routing.experts.sort().values)
    expected = torch.cat([alone[0][:3], *(experts[3:] for experts in alone)])
    found = torch.from_numpy(sampler.experts(prompt, completions)).sort().values
    assert torch.equal(found, expected)
