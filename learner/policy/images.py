"""Images in packs: patches, the inputs that their features replace, and positions in three dimensions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.common.models.images import ImageFile, ImagePatches, ImageReader
from offbeat.learner.policy.packing import Pack, PackedImages, WholeRows


class ImagePacker:
    """Puts the images of prompts into packs."""

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader

    def add(self, packed: Pack, images: Sequence[Sequence[ImageFile]]) -> Pack:
        """Return a pack with the images of its prompts, in the prompts' order, and with positions `[3, num_inputs]`.

        Raises `ServiceError` for a file that has changed, `ImageError` where tokens and images do not agree.
        """
        patches: list[ImagePatches] = []
        inputs: list[NDArray[np.int64]] = []
        positions = np.empty((3, len(packed.token_ids)), dtype=np.int64)
        of_prompts = iter(images)
        for span in packed.spans:
            own = positions[:, span.start : span.start + span.length]
            if span.prefix:
                before = span.prefix[-1]
                own[:] = positions[:, before.start : before.stop].max() + 1 + np.arange(span.length)
                continue
            # A pack without sequences has a span too.
            of_prompt = [self._reader.read(image.read()) for image in next(of_prompts, ())]
            token_ids = packed.token_ids[span.start : span.start + span.length].numpy()
            self._reader.check_prompt(token_ids, of_prompt)
            is_image = token_ids == self._reader.image_token_id
            own[:] = prompt_positions(is_image, of_prompt, merge_size=self._reader.merge_size)
            inputs.append(span.start + np.flatnonzero(is_image))
            patches += of_prompt
        side = self._reader.merge_size
        smallest = ImagePatches(np.zeros((side * side, self._reader.patch_numbers), dtype=np.float32), side, side, 0)
        patches = patches or [smallest]
        added = PackedImages(
            torch.from_numpy(np.concatenate([image.values for image in patches])),
            torch.tensor([(1, image.rows, image.columns) for image in patches]),
            torch.from_numpy(np.concatenate(inputs)),
        )
        return packed._replace(position_ids=torch.from_numpy(positions), images=added)


def prompt_positions(is_image: NDArray[np.bool_], images: Sequence[ImagePatches], *, merge_size: int) -> NDArray[np.int64]:
    """Return the positions of a prompt's tokens in time, height and width, `[3, num_tokens]`.

    Text counts on in all three. The tokens of an image share its time, and count its rows and columns from there; the text
    behind it goes on after the largest of them (Qwen2-VL, section 2.1). `is_image`: `[num_tokens]`.
    """
    positions = np.empty((3, len(is_image)), dtype=np.int64)
    remaining = iter(images)
    index = position = 0
    while index < len(is_image):
        if not is_image[index]:
            positions[:, index] = position
            index, position = index + 1, position + 1
            continue
        image = next(remaining)
        rows, columns = image.rows // merge_size, image.columns // merge_size
        grid = np.indices((1, rows, columns)).reshape(3, -1)
        positions[:, index : index + rows * columns] = position + grid
        index, position = index + rows * columns, position + max(rows, columns)
    return positions


def image_states(
    policy: PreTrainedModel,
    token_ids: Tensor,
    position_ids: Tensor,
    images: PackedImages,
    rows: WholeRows | None,
    **options: Any,
) -> Tensor:
    """Return the last hidden states of a pack with images, `[num_inputs, hidden_size]`, computed in `rows` if there are any.

    `options` are further arguments of the policy's language model. Only the prompts' own image tokens are replaced: a policy
    may sample that token too, and the engine treats it as text.
    """
    base: Any = policy.base_model
    outputs = base.get_image_features(images.patches, images.grids)
    features = torch.cat(list(outputs.pooler_output))
    embeddings = base.get_input_embeddings()(token_ids)
    num_tokens = len(images.inputs)
    if not num_tokens:
        embeddings = embeddings + 0.0 * features.sum().to(embeddings.dtype)
    embeddings = embeddings.index_copy(0, images.inputs, features[:num_tokens].to(embeddings.dtype))
    if "deepstack_features" in outputs:
        assert rows is None, "a model with these can be packed"
        # Qwen3-VL: features of the tower's inner layers, added to the first layers' states.
        inner = [torch.cat(list(of_layer)) for of_layer in outputs.deepstack_features]
        if not num_tokens:
            embeddings = embeddings + 0.0 * torch.stack(inner).sum().to(embeddings.dtype)
        options["visual_pos_masks"] = torch.zeros_like(token_ids, dtype=torch.bool).index_fill(0, images.inputs, True)[None]
        options["deepstack_visual_embeds"] = [of_layer[:num_tokens] for of_layer in inner]
    inputs = torch.arange(len(token_ids), device=token_ids.device)[None] if rows is None else rows.inputs
    states = base.language_model(
        inputs_embeds=embeddings[inputs], position_ids=position_ids[:, inputs], use_cache=False, **options
    ).last_hidden_state.flatten(0, 1)
    return states if rows is None else states.index_select(0, rows.places)
