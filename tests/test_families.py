"""Models of every family that people train: loaded, trained, published, sampled and exported, with one set of log-probs."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.generic import ModelOutput

from offbeat.actor.engines.batches import OwnCaches
from offbeat.actor.engines.choice import make_engine
from offbeat.actor.engines.engine import Engine, EngineSettings
from offbeat.common.weights.flat import WeightBuffer
from offbeat.learner.training.trainer import Trainer
from offbeat.protocols.message_parts import ModelHashes
from offbeat.protocols.messages import Sampling
from tests.families import FAMILIES, IN_VLLM, LARGER, make_family
from tests.learner.training.trainer_cases import make_config, make_groups
from tests.weights import check_updates, plain_logprobs

pytestmark = pytest.mark.engine


SETTINGS = EngineSettings(dtype="float32", max_model_len=64, hashes=ModelHashes("", "", ""), seed=3, options={})


def start(folder: Path, *, kind: Literal["transformers", "vllm"] = "transformers", records_experts: bool = False) -> Engine:
    # Of a GPU, transformers would take nearly all memory for three completions.
    options = {"max_memory_percent": 0.1} if kind == "transformers" else {}
    return make_engine(kind, str(folder), SETTINGS._replace(options=options, records_experts=records_experts))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_trained_published_sampled_and_exported_with_the_same_logprobs(name, tiny_model, tmp_path):
    folder, exported = tmp_path / "model", tmp_path / "exported"
    make_family(folder, name, tiny_model)
    with closing(Trainer(make_config(folder, learning_rate=0.01))) as trainer:
        obstacle = trainer.networks.module.packing_obstacle
        expected = FAMILIES[name].obstacle
        assert obstacle is expected or (expected is not None and obstacle is not None and expected in obstacle)
        (metrics,) = trainer.train_batch(make_groups(3))
        assert 0 < cast(float, metrics["loss/grad_norm"]) < float("inf")
        weights = WeightBuffer(trainer.layout())
        trainer.snapshot(dict(weights.views()))
        trainer.save_model(exported)
        plain = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager").eval()
        scored = trainer.score([5, 6, 7, 8, 9, 10, 11, 12]).logprobs
    torch.testing.assert_close(
        torch.from_numpy(scored), plain_logprobs(plain, [5], [6, 7, 8, 9, 10, 11, 12]), atol=1e-4, rtol=0
    )
    with closing(start(folder)) as engine:
        engine.load_weights(weights, 1, recompute_kv=True)
        torch.testing.assert_close(engine.score([5, 6, 7, 8, 9, 10, 11, 12]).logprobs, scored, atol=1e-4, rtol=0)
        engine.submit(["a", "b", "c"], [5, 6, 7, 8, 9], Sampling(10, 1.0))
        completions = []
        while engine.num_unfinished:
            completions += engine.step()
    assert len({tuple(completion.token_ids.tolist()) for completion in completions}) > 1
    for completion in completions:
        expected = plain_logprobs(plain, [5, 6, 7, 8, 9], completion.token_ids.tolist())
        torch.testing.assert_close(torch.from_numpy(completion.behavior_logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.vllm
@pytest.mark.parametrize("name", IN_VLLM)
def test_vllm_computes_what_the_learner_does_after_every_update(name, tiny_model, tmp_path):
    make_family(tmp_path, name, tiny_model, LARGER | IN_VLLM[name])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with closing(start(tmp_path, kind="vllm")) as engine:
        check_updates(engine, plain, [5, 6, 7, 8, 9, 10, 11, 12], times=1.1, atol=1e-4)


@pytest.mark.vllm
def test_weights_of_an_expert_are_views_or_keep_their_names(tiny_model, tmp_path, monkeypatch):
    from offbeat.actor.engines import vllm_worker

    make_family(tmp_path, "Mixtral", tiny_model)
    config = cast(Any, SimpleNamespace(model=str(tmp_path), is_multimodal_model=False))
    joined = torch.arange(4 * 48 * 16.0).view(4, 48, 16)
    weights = {"model.layers.0.mlp.experts.gate_up_proj": joined}
    released = vllm_worker.released_weights(config, weights)
    third = released["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    torch.testing.assert_close(third, joined[2, 24:])
    joined.mul_(2)
    torch.testing.assert_close(third, joined[2, 24:])
    copied = {"another": torch.zeros(1)}
    monkeypatch.setattr(vllm_worker, "revert_weight_conversion", lambda model, weights: copied)
    assert vllm_worker.released_weights(config, weights) is weights


def test_cache_is_passed_by_the_name_that_the_model_has_for_it(tiny_model, tmp_path, monkeypatch):
    make_family(tmp_path / "model", "Mamba 2", tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    plain = model.forward

    def forward(input_ids, use_cache, cache=None, **ignored):
        outputs = plain(input_ids=input_ids, use_cache=use_cache, cache_params=cache)
        return ModelOutput(logits=outputs.logits, cache=outputs.cache_params)

    monkeypatch.setattr(model, "forward", forward)
    batches = OwnCaches(model, SETTINGS, [])
    with torch.no_grad():
        batches.add(["a"], [5, 6, 7], max_new_tokens=6, temperature=1.0)
        completions = [completion for _ in range(6) for completion in batches.step()]
    monkeypatch.undo()
    ((_, token_ids, logprobs, _),) = completions
    expected = plain_logprobs(model, [5, 6, 7], list(token_ids))
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
