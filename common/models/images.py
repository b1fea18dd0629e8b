"""Images of prompts: files that are checked before they are used, and the patches that a vision-language model reads."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from offbeat.common.errors import ServiceError, SettingError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

SETTING = "data.image_field"
MARKER = "<image>"
"""Text that stands for an image in a prompt."""
MAX_PROMPT_BYTES = 16 << 20
"""Most bytes of the image files of one prompt."""
MAX_PIXELS = 1 << 24
"""Most pixels of an image file. A small file may have billions: it would take all memory."""
FORMATS = ("PNG", "JPEG", "WEBP")
MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
"""Models whose images are supported: they number an image's positions, and mark its place in a prompt, in the same way."""


class ImageError(ValueError):
    """Bytes that cannot be used as an image; the text says why."""


class ImageFile(NamedTuple):
    """An image of a prompt, as it was when the prompts were loaded."""

    path: str
    hash: int
    """`hash_image` of the content."""
    num_bytes: int
    num_tokens: int
    """Tokens of the prompt that the image takes the place of."""

    def read(self) -> bytes:
        """Return the file's content; raise `ServiceError` unless it is what it was."""
        try:
            content = Path(self.path).read_bytes()
        except OSError as error:
            raise ServiceError(f"the image {self.path} of a prompt cannot be read any more ({error.strerror})") from error
        if hash_image(content) != self.hash:
            raise ServiceError(f"the image {self.path} has changed since the run began: give it as it was, and resume")
        return content


class ImagePatches(NamedTuple):
    """An image as the model reads it."""

    values: NDArray[np.float32]
    """`[rows * columns, numbers of a patch]`, in the model's order."""
    rows: int
    """Patches from top to bottom."""
    columns: int
    """Patches from left to right."""
    hash: int
    """`hash_image` of the file."""


class ImageReader:
    """Makes patches of image files, with transformers' processor on Pillow.

    transformers' processor on torchvision rounds differently, so it is not used where torchvision is installed either: learner
    and actors compute the same patches.
    """

    def __init__(self, folder: Path) -> None:
        """Read the model's config and processor; raise `SettingError` for a model without images, and without Pillow."""
        fields = json.loads((folder / "config.json").read_bytes())
        if fields.get("model_type") not in MODEL_TYPES:
            problem = f"the model is a {fields.get('model_type')}, and images are supported for {', '.join(MODEL_TYPES)}"
            raise SettingError(SETTING, str(folder), problem, "Give such a model, or remove the setting.")
        self.architectures: tuple[str, ...] = tuple(fields["architectures"])
        self.image_token_id: int = fields["image_token_id"]
        """Each token of an image in a prompt has this id."""
        self.placeholder_ids: tuple[int, int, int] = (
            fields["vision_start_token_id"],
            fields["image_token_id"],
            fields["vision_end_token_id"],
        )
        """The tokens of an image in a prompt, before the middle one is repeated."""
        self._processor = _load_processor(folder)
        self.merge_size: int = self._processor.merge_size
        """Patches along each side of the square that becomes one token."""
        self.patch_numbers: int = 3 * self._processor.temporal_patch_size * self._processor.patch_size**2
        """Numbers of one patch."""
        side = self._processor.patch_size * self.merge_size
        self.largest_image: int = self._processor.size["longest_edge"] // side**2
        """Tokens of the largest image: the processor makes larger ones smaller."""

    def read(self, content: bytes) -> ImagePatches:
        """Return the patches of an image file; raise `ImageError` for one that cannot be used."""
        image = open_image(content)
        try:
            features = self._processor(images=[image], return_tensors="np")
        # transformers refuses sides that differ more than 200 times.
        except ValueError as error:
            raise ImageError(f"the model's processor refuses it ({one_line(error)})") from error
        _, rows, columns = features["image_grid_thw"][0].tolist()
        return ImagePatches(features["pixel_values"], rows, columns, hash_image(content))

    def num_tokens(self, patches: ImagePatches) -> int:
        """Return the number of a prompt's tokens that the image takes the place of."""
        return patches.rows * patches.columns // self.merge_size**2

    def check_prompt(self, token_ids: NDArray[np.int32], images: Sequence[ImagePatches]) -> None:
        """Raise `ImageError` unless the prompt has exactly the tokens of these images."""
        there, needed = int(np.count_nonzero(token_ids == self.image_token_id)), sum(map(self.num_tokens, images))
        if there != needed:
            raise ImageError(f"the prompt has {there} tokens of images, and its images make {needed}")


def hash_image(content: bytes) -> int:
    """Return the 64-bit hash by which a file of an image is known."""
    return xxhash.xxh3_64_intdigest(content)


def open_image(content: bytes) -> Image:
    """Decode an image file as RGB; raise `ImageError` for other files, damaged ones, and more than `MAX_PIXELS`."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(content) > MAX_PROMPT_BYTES:
        raise ImageError(f"it has {len(content)} bytes, more than {MAX_PROMPT_BYTES}")
    try:
        # Reads the header alone.
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ImageError(f"it has {width} x {height} pixels, more than {MAX_PIXELS}")
            # Turned as vLLM and transformers turn photos, so that the trained model is served what it has learned from.
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise ImageError(f"it is not an image in one of the formats {', '.join(FORMATS)}") from error
    except (OSError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        raise ImageError(f"it cannot be decoded ({one_line(error)})") from error


def _load_processor(folder: Path) -> Any:
    # Both take seconds to import, and only runs with images need them.
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise SettingError(SETTING, str(folder), "Pillow is not installed", "pip install 'offbeat[images]'") from error
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    try:
        return Qwen2VLImageProcessorPil.from_pretrained(folder)
    except (OSError, ValueError) as error:
        problem = f"the model's image processor cannot be loaded ({one_line(error)})"
        raise SettingError("model.path", str(folder), problem, "Copy preprocessor_config.json into the folder.") from error
