"""An engine of a model folder without weights computes what one with weights does, once an update has brought them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.actor.engines.choice import make_engine
from offbeat.actor.engines.engine import EngineSettings
from offbeat.common.models.folders import WEIGHT_FILES
from offbeat.protocols.message_parts import ModelHashes
from offbeat.protocols.messages import Sampling
from tests.weights import buffer_of

pytestmark = pytest.mark.engine
TOKENS = [5, 6, 7, 9, 8]


@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=pytest.mark.vllm), "transformers"])
def test_weights_of_an_update_are_all_that_the_model_needs(kind, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns(*WEIGHT_FILES))
    hashes = ModelHashes("", "", "")
    engine = make_engine(
        kind, str(tmp_path / "model"), EngineSettings(dtype="float32", max_model_len=64, hashes=hashes, seed=3, options={})
    )
    assert not engine.info.has_weight_files
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    if kind == "vllm":
        without_norm = [item for item in weights.items() if item[0] != "model.norm.weight"]
        engine.load_weights(buffer_of(without_norm), 0, recompute_kv=True)
        assert np.isnan(engine.score(TOKENS).logprobs).all(), "a weight that no update brings shows in the canary"
    for version in (1, 2):
        engine.load_weights(buffer_of(weights.items()), version, recompute_kv=True)
        with torch.inference_mode():
            logits = model(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(engine.score(TOKENS).logprobs, expected, atol=1e-4)
        for weight in weights.values():
            weight.mul_(1.1)
    engine.submit(["0"], TOKENS, Sampling(8))
    done = []
    while engine.num_unfinished:
        done += engine.step()
    assert [completion.segments[0].policy_version for completion in done] == [2]
    assert np.isfinite(done[0].behavior_logprobs).all()
    engine.close()
