"""A pack with images computes what transformers' model computes of each prompt with its images, outside a pack."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from offbeat.common.models.folders import hash_model
from offbeat.common.models.images import ImageFile, ImageReader, hash_image
from offbeat.common.settings.config import Config, DataSection, ModelSection
from offbeat.learner.policy.images import ImagePacker, prompt_positions
from offbeat.learner.policy.loading import check_policy, load_policy, write_policy
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packing import Pack, pack

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["tiny_vision_model", "tiny_deep_vision_model", "tiny_linear_vision_model"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def reader(folder: Path) -> ImageReader:
    return ImageReader(folder)


@pytest.fixture(scope="module")
def module(folder: Path) -> CompletionLogprobs:
    model = ModelSection(path=str(folder), dtype="float32")
    loaded = load_policy(Config(model=model, data=DataSection(image_field="image")))
    check_policy(loaded, model, torch.device("cpu"))
    return loaded


@pytest.fixture
def files(tmp_path: Path, reader: ImageReader) -> list[ImageFile]:
    """Return two images of noise, of six tokens and of two."""
    random = np.random.default_rng(0)
    made = []
    for index, (height, width) in enumerate(((56, 84), (28, 56))):
        path = tmp_path / f"{index}.png"
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
        content = path.read_bytes()
        patches = reader.read(content)
        made.append(ImageFile(str(path), hash_image(content), len(content), reader.num_tokens(patches)))
    return made


def prompt_of(reader: ImageReader, images: Sequence[ImageFile]) -> list[int]:
    start, image_token, end = reader.placeholder_ids
    return [5, 6, *(token for image in images for token in (start, *[image_token] * image.num_tokens, end, 7))]


def packed_with(reader: ImageReader, prompts: list[list[ImageFile]], completions: list[list[list[int]]]) -> Pack:
    packed = pack([(prompt_of(reader, images), own) for images, own in zip(prompts, completions, strict=True)])
    return ImagePacker(reader).add(packed, prompts)


@torch.inference_mode()
def plain_logprobs(policy: Any, reader: ImageReader, images: list[ImageFile], completion: list[int]) -> torch.Tensor:
    """Compute the log-probs with the model's own forward, positions and attention."""
    prompt = prompt_of(reader, images)
    ids = torch.tensor([[*prompt, *completion]])
    inputs: dict[str, Any] = {}
    if images:
        patches = [reader.read(image.read()) for image in images]
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([image.values for image in patches]))
        inputs["image_grid_thw"] = torch.tensor([(1, image.rows, image.columns) for image in patches])
        inputs["mm_token_type_ids"] = (ids == reader.image_token_id).int()
    logits = policy(input_ids=ids, **inputs).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


def test_log_probs_in_a_pack_are_those_of_transformers(
    folder: Path, reader: ImageReader, module: CompletionLogprobs, files: list[ImageFile]
) -> None:
    from transformers import AutoModelForImageTextToText

    prompts = [files, [], [files[1]]]
    completions = [[[8, 9, 10, 11], [12], [9, 30, 31]], [[8, 9], [13, 14, 15]], [[20, 21]]]
    packed = packed_with(reader, prompts, completions)
    with torch.inference_mode():
        logprobs, _, _ = module(*packed.inputs, 1.0, packed.images)
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    expected = [
        plain_logprobs(plain, reader, images, own)
        for images, of_prompt in zip(prompts, completions, strict=True)
        for own in of_prompt
    ]
    torch.testing.assert_close(logprobs, torch.cat(expected), atol=1e-5, rtol=0)
    # The images matter: with blank ones the same tokens have other log-probs.
    assert packed.images is not None
    blank = replace(packed.images, patches=torch.zeros_like(packed.images.patches))
    other, _, _ = module(*packed.inputs, 1.0, blank)
    assert (other - logprobs).abs().max() > 1e-2


def test_positions_are_those_of_transformers(reader: ImageReader, module: CompletionLogprobs, files: list[ImageFile]) -> None:
    prompt = torch.tensor([prompt_of(reader, files)])
    patches = [reader.read(image.read()) for image in files]
    grids = torch.tensor([(1, image.rows, image.columns) for image in patches])
    is_image = prompt == reader.image_token_id
    base: Any = module.policy.base_model
    expected, _ = base.get_rope_index(prompt, mm_token_type_ids=is_image.int(), image_grid_thw=grids)
    positions = prompt_positions(is_image[0].numpy(), patches, merge_size=reader.merge_size)
    assert positions.tolist() == expected[:, 0].tolist()


def test_sampled_image_token_is_text(reader: ImageReader, module: CompletionLogprobs, files: list[ImageFile]) -> None:
    with_token = packed_with(reader, [[files[1]]], [[[8, reader.image_token_id, 9]]])
    assert with_token.images is not None
    assert len(with_token.images.inputs) == files[1].num_tokens
    logprobs, _, _ = module(*with_token.inputs, 1.0, with_token.images)
    assert logprobs.isfinite().all()


@pytest.mark.parametrize("num_images", [0, 1])
def test_every_weight_gets_a_gradient_with_images_and_without(
    reader: ImageReader, module: CompletionLogprobs, files: list[ImageFile], num_images: int
) -> None:
    packed = packed_with(reader, [files[:num_images]], [[[8, 9, 10]]])
    logprobs, _, _ = module(*packed.inputs, 1.0, packed.images)
    module.zero_grad()
    logprobs.sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if "visual" in name}
    assert all(gradient is not None for gradient in gradients.values())
    assert any(gradient.abs().max() > 0 for gradient in gradients.values() if gradient is not None) == bool(num_images)


def test_image_processor_that_transformers_has_put_into_another_file_is_kept_and_hashed(
    tiny_vision_model: Path, tmp_path: Path
) -> None:
    folder, kept = shutil.copytree(tiny_vision_model, tmp_path / "model"), tmp_path / "kept"
    # As `AutoProcessor.save_pretrained` of transformers 5 leaves a model's folder.
    own = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": own}))
    content = (folder / "processor_config.json").read_bytes()
    hashes = hash_model(folder)
    policy = AutoModelForImageTextToText.from_pretrained(folder)
    write_policy(policy, policy.state_dict(), kept, tokenizer=str(folder))
    assert (kept / "processor_config.json").read_bytes() == content
    assert ImageReader(kept).largest_image == ImageReader(tiny_vision_model).largest_image
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": own | {"image_mean": [0.0, 0.0, 0.0]}}))
    assert hash_model(folder).config != hashes.config
    # What else is there makes no other patches.
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 256}))
    length = hash_model(folder)
    (folder / "processor_config.json").unlink()
    assert hash_model(folder) == length
