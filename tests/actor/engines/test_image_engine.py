"""vLLM samples from prompts with images at the log-probs that the learner computes for them, also after new weights."""

import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from offbeat.actor.engines.choice import make_engine
from offbeat.actor.engines.engine import Completion, Engine, EngineSettings
from offbeat.common.errors import SettingError
from offbeat.common.models.images import ImageFile, ImageReader, hash_image
from offbeat.common.settings.config import Config, DataSection, ModelSection
from offbeat.learner.policy.images import ImagePacker
from offbeat.learner.policy.loading import load_policy
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packing import pack
from offbeat.protocols.message_parts import ModelHashes
from offbeat.protocols.messages import Sampling
from offbeat.protocols.payload import Segment
from tests.weights import buffer_of

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.engine

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.15}
OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "hashes": ModelHashes("", "", ""),
    "seed": 3,
    "options": {},
}


def learner_logprobs(
    module: CompletionLogprobs, reader: ImageReader, prompt: list[int], images: list[ImageFile], completions: list[Completion]
) -> torch.Tensor:
    packed = pack([(prompt, [completion.token_ids for completion in completions])])
    packed = ImagePacker(reader).add(packed, [images])
    with torch.inference_mode():
        return module(*packed.inputs, 1.0, packed.images)[0]


def sample(engine: Engine, names: list[str]) -> list[Completion]:
    finished: dict[str, Completion] = {}
    while engine.num_unfinished:
        finished |= {completion.request_id: completion for completion in engine.step()}
    return [finished[name] for name in names]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("model", "dtype"),
    [("tiny_vision_model", "float32"), ("tiny_deep_vision_model", "float32"), ("tiny_linear_vision_model", "bfloat16")],
)
def test_engine_and_learner_agree_on_every_token(
    model: str, dtype: Literal["float32", "bfloat16"], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    tolerance = TOLERANCES[dtype]
    folder = request.getfixturevalue(model)
    reader = ImageReader(folder)
    random = np.random.default_rng(0)
    files, patches = [], []
    for index, (height, width) in enumerate(((56, 84), (28, 56))):
        encoded = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(encoded, "PNG")
        path = tmp_path / f"{index}.png"
        path.write_bytes(encoded.getvalue())
        patches.append(reader.read(encoded.getvalue()))
        num_tokens = reader.num_tokens(patches[-1])
        files.append(ImageFile(str(path), hash_image(encoded.getvalue()), len(encoded.getvalue()), num_tokens))
    start, token, end = reader.placeholder_ids
    prompt = [5, start, *[token] * files[0].num_tokens, end, 6, 7, start, *[token] * files[1].num_tokens, end, 8]

    module = load_policy(Config(model=ModelSection(path=str(folder), dtype=dtype), data=DataSection(image_field="image")))
    engine = make_engine("vllm", str(folder), EngineSettings(**OPTIONS, dtype=dtype, images=reader))
    try:
        assert engine.info.takes_images
        names = ["a", "b", "c"]
        generator = torch.Generator().manual_seed(1)
        before = None
        # The second version is loaded by vLLM's own loader, and those after it as copies.
        for version in range(4):
            for parameter in module.policy.parameters():
                if version:
                    parameter.data += 0.3 * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
            weights = [(name, parameter.data) for name, parameter in module.policy.named_parameters()]
            engine.load_weights(buffer_of(weights), version, recompute_kv=False)
            engine.submit(names, prompt, Sampling(max_new_tokens=12), patches)
            engine.submit(["text"], [5, 6, 7], Sampling(max_new_tokens=4))
            *completions, text = sample(engine, [*names, "text"])
            expected = learner_logprobs(module, reader, prompt, files, completions)
            behavior = np.concatenate([completion.behavior_logprobs for completion in completions])
            np.testing.assert_allclose(behavior, expected.numpy(), atol=tolerance)
            own = learner_logprobs(module, reader, [5, 6, 7], [], [text])
            np.testing.assert_allclose(text.behavior_logprobs, own.numpy(), atol=tolerance)
            assert {completion.segments for completion in completions} == {(Segment(version, 0),)}
            # The claim is about this version's vision tower: under the weights before, other log-probs follow.
            assert before is None or np.abs(behavior[:3] - before[:3]).max() > 1e-3
            before = behavior

        # New weights with the prompt computed anew, in the middle of completions: the tower runs again too.
        engine.submit(names, prompt, Sampling(max_new_tokens=12), patches)
        ended = [completion for _ in range(3) for completion in engine.step()]
        for parameter in module.policy.get_submodule("model.visual").parameters():
            parameter.data *= 1.5
        weights = [(name, parameter.data) for name, parameter in module.policy.named_parameters()]
        engine.load_weights(buffer_of(weights), 4, recompute_kv=True)
        changed = [completion for completion in sample_rest(engine) if completion.segments[-1].policy_version == 4]
        assert len(changed) + len(ended) == len(names) and changed
        for completion in changed:
            first = completion.segments[-1].first_token
            expected = learner_logprobs(module, reader, prompt, files, [completion])
            np.testing.assert_allclose(completion.behavior_logprobs[first:], expected.numpy()[first:], atol=tolerance)
    finally:
        engine.close()


def sample_rest(engine: Engine) -> list[Completion]:
    completions: list[Completion] = []
    while engine.num_unfinished:
        completions += engine.step()
    return completions


def test_engine_of_transformers_takes_no_images(tiny_vision_model: Path) -> None:
    settings = EngineSettings(**OPTIONS, dtype="float32", images=ImageReader(tiny_vision_model))
    with pytest.raises(SettingError, match="prompts have images, which only vLLM takes"):
        make_engine("transformers", str(tiny_vision_model), settings)
