"""The images of a row: files that its `task.image_field` names, and their tokens in its prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.common.errors import SettingError
from offbeat.common.models.images import MARKER, MAX_PROMPT_BYTES, SETTING, ImageError, ImageFile, ImageReader, hash_image
from offbeat.common.settings.config import TaskSection
from offbeat.common.user_code.functions import is_function
from offbeat.learner.leases.data_rows import DataRow
from offbeat.learner.leases.rendering import render
from offbeat.protocols.payload import MAX_IMAGES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Rendered(NamedTuple):
    """A prompt as text for the reward, as tokens for the engine, and its images."""

    text: str
    token_ids: NDArray[np.int32]
    """`[num_tokens]`, the image token once for each token of an image."""
    images: tuple[ImageFile, ...] = ()


def image_folder(source: str) -> Path | None:
    """Return the folder that paths of images are relative to: a file's own, or the data folder; None for other sources."""
    path = Path(source).expanduser()
    if is_function(source) or not path.exists():
        return None
    return (path if path.is_dir() else path.parent).resolve()


def render_with_images(
    row: DataRow, task: TaskSection, tokenizer: PreTrainedTokenizerBase, reader: ImageReader, folder: Path | None
) -> Rendered:
    """Return a row's prompt with its images; raise `SettingError` that names the row where it cannot be used."""
    placeholder = "".join(tokenizer.convert_ids_to_tokens(list(reader.placeholder_ids)))
    prompt = _replaced(row.fields.get(task.prompt_field), MARKER, placeholder)
    marked = row._replace(fields=row.fields | {task.prompt_field: prompt}) if task.prompt_field in row.fields else row
    text, token_ids = render(marked, task, tokenizer)
    images = _read_images(row, task.image_field, reader, folder)
    is_image = token_ids == reader.image_token_id
    if int(is_image.sum()) != len(images):
        problem = f"the prompt of {row.place} has {int(is_image.sum())} places for images, and the row names {len(images)}"
        raise SettingError(SETTING, task.image_field, problem, f"Write {MARKER} in the prompt once for each image.")
    lengths = np.ones(len(token_ids), dtype=np.int64)
    lengths[is_image] = [image.num_tokens for image in images]
    return Rendered(text.replace(placeholder, MARKER), np.repeat(token_ids, lengths), images)


def _replaced(prompt: Any, marker: str, placeholder: str) -> Any:
    """Return a prompt, text or messages, with another text for each marker; anything else as it is."""
    if isinstance(prompt, str):
        return prompt.replace(marker, placeholder)
    if not isinstance(prompt, list):
        return prompt
    return [
        message | {"content": _replaced(message.get("content"), marker, placeholder)} if isinstance(message, dict) else message
        for message in prompt
    ]


def _read_images(row: DataRow, field: str, reader: ImageReader, folder: Path | None) -> tuple[ImageFile, ...]:
    named = row.fields.get(field)
    paths = [] if named is None else [named] if isinstance(named, str) else named
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        cure = "Choose a field that holds the path of an image, a list of paths, or nothing."
        raise SettingError(SETTING, field, f"in {row.place} it is a {type(named).__name__}", cure)
    if len(paths) > MAX_IMAGES:
        raise SettingError(SETTING, field, f"{row.place} has {len(paths)} images", f"Give at most {MAX_IMAGES}.")
    images = tuple(_read_image(path, row, field, reader, folder) for path in paths)
    num_bytes = sum(image.num_bytes for image in images)
    if num_bytes > MAX_PROMPT_BYTES:
        problem = f"the images of {row.place} have {num_bytes} bytes, more than {MAX_PROMPT_BYTES}"
        raise SettingError(SETTING, field, problem, "Make them smaller.")
    return images


def _read_image(name: str, row: DataRow, field: str, reader: ImageReader, folder: Path | None) -> ImageFile:
    path = Path(name).expanduser()
    if not path.is_absolute():
        if folder is None:
            problem = f"the path {name!r} of {row.place} is relative, and the data has no folder here"
            raise SettingError(SETTING, field, problem, "Give absolute paths.")
        path = folder / path
    try:
        # Looked at before it is read: a file may be larger than memory.
        if path.stat().st_size > MAX_PROMPT_BYTES:
            raise ImageError(f"it has {path.stat().st_size} bytes, more than {MAX_PROMPT_BYTES}")
        content = path.read_bytes()
        patches = reader.read(content)
    except OSError as error:
        problem = f"the image {name!r} of {row.place} cannot be read ({error.strerror})"
        raise SettingError(SETTING, field, problem, "Correct the path; it is relative to the data.") from error
    except ImageError as error:
        problem = f"the image {name!r} of {row.place} cannot be used: {error}"
        raise SettingError(SETTING, field, problem, "Save it again, or remove the row.") from error
    return ImageFile(str(path), hash_image(content), len(content), reader.num_tokens(patches))
