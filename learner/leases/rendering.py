"""Rendering of a row's prompt: plain text or a conversation, through the tokenizer's chat template, to token ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import jinja2
import numpy as np
from numpy.typing import NDArray

from offbeat.common.errors import SettingError
from offbeat.common.models.folders import encode_prompt
from offbeat.common.models.images import MARKER, MAX_PROMPT_BYTES, SETTING, ImageError, ImageFile, ImageReader, hash_image
from offbeat.common.settings.config import DataSection
from offbeat.common.user_code.functions import is_function
from offbeat.common.user_code.requests import CallRefused, for_template, read_responses
from offbeat.learner.leases.data_rows import DataRow
from offbeat.protocols.payload import MAX_IMAGES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGINNING = 64
"""Characters for each token that a prompt may have; a longer text is judged by so many first."""

Message = dict[str, Any]
"""A message of a conversation: `role`, `content`, and whatever else the chat template knows."""


def render(row: DataRow, data: DataSection, tokenizer: PreTrainedTokenizerBase) -> tuple[str, NDArray[np.int32]]:
    """Return a row's prompt as text, for the reward, and as token ids, `[num_tokens]`.

    The text of a conversation is the content of its last message. Raises `SettingError` that names the row.
    """
    prompt = _field(row, "data.prompt_field", data.prompt_field)
    tools: list[dict[str, Any]] = []
    if _is_request(prompt):
        prompt, tools = _read_request(prompt, row, data)
    if isinstance(prompt, str):
        if not data.chat_template:
            return prompt, _tokenize(prompt, data, partial(encode_prompt, tokenizer))
        messages: list[Message] = [{"role": "user", "content": prompt}]
    else:
        messages = _conversation(prompt, row, data)
    return messages[-1]["content"], _apply_template(_with_system_prompt(messages, row, data), tools, row, data, tokenizer)


def _field(row: DataRow, setting: str, name: str) -> Any:
    if name not in row.fields:
        there = ", ".join(row.fields) or "none"
        raise SettingError(setting, name, f"{row.place} has no such field", f"Its fields are: {there}.")
    return row.fields[name]


def _is_request(prompt: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a prompt is a request of OpenAI's Responses API, as rows of NeMo Gym hold it."""
    return isinstance(prompt, dict) and "input" in prompt


def _read_request(request: dict[str, Any], row: DataRow, data: DataSection) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return the messages and the tools of a request, in the form of chat templates."""
    try:
        messages, tools = read_responses(request)
    except CallRefused as refused:
        cure = "Choose a field that holds text, a list of messages, or a request that an agent could send."
        raise SettingError("data.prompt_field", data.prompt_field, f"in {row.place} {refused}", cure) from refused
    return [dict(for_template(message)) for message in messages], tools


def _conversation(prompt: object, row: DataRow, data: DataSection) -> list[Message]:
    """Return a prompt that is a list of messages, checked; the last one must leave the answer to the model."""
    if not isinstance(prompt, list) or not prompt or not all(_is_message(message) for message in prompt):
        kind = "a list with other things than messages" if isinstance(prompt, list) else f"of type {type(prompt).__name__}"
        cure = 'Choose a field that holds text, or a list of messages: [{"role": "user", "content": "..."}].'
        raise SettingError("data.prompt_field", data.prompt_field, f"in {row.place} it is {kind}", cure)
    if not data.chat_template:
        problem = f"{row.place} is a conversation, which only a chat template turns into text"
        raise SettingError("data.chat_template", False, problem, "Set data.chat_template=true.")
    if prompt[-1]["role"] == "assistant":
        problem = f"the conversation of {row.place} ends with a message of the assistant, whose turn it should be"
        raise SettingError("data.prompt_field", data.prompt_field, problem, "Remove the last message.")
    # Tables hold every key of any message in each message, with null where a message lacks it.
    messages = [{**message, "content": message.get("content") or ""} for message in prompt]
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    # OpenAI has null where a message only calls tools.
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))


def _with_system_prompt(messages: list[Message], row: DataRow, data: DataSection) -> list[Message]:
    """Return the messages after the row's own system prompt, or that of the settings; a conversation may begin with its own."""
    content: object = data.system_prompt
    if data.system_prompt_field:
        content = _field(row, "data.system_prompt_field", data.system_prompt_field) or content
    if not isinstance(content, str):
        problem = f"in {row.place} it is of type {type(content).__name__}"
        raise SettingError("data.system_prompt_field", data.system_prompt_field, problem, "Choose a field that holds text.")
    if not content or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": content}, *messages]


def _apply_template(
    messages: list[Message], tools: list[dict[str, Any]], row: DataRow, data: DataSection, tokenizer: PreTrainedTokenizerBase
) -> NDArray[np.int32]:
    if tokenizer.chat_template is None:
        raise SettingError("data.chat_template", True, "the tokenizer has no chat template", "Set data.chat_template=false.")
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **_template_arguments(tools, row, data)
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        problem = f"the template refuses the prompt of {row.place} ({error})"
        raise SettingError("data.chat_template", True, problem, "Correct the messages or the template's arguments.") from error
    assert isinstance(rendered, str)
    # The template has put the special tokens into the text already.
    return _tokenize(rendered, data, partial(tokenizer.encode, add_special_tokens=False))


def _tokenize(text: str, data: DataSection, encode: Callable[[str], list[int]]) -> NDArray[np.int32]:
    """Return the token ids of a text, or of its beginning where that alone has over twice the tokens that a prompt may have.

    The tokens of a line of megabytes, such as a file without line ends, take a minute.
    """
    beginning = text[: data.max_prompt_tokens * BEGINNING]
    token_ids = encode(beginning)
    if len(beginning) < len(text) and len(token_ids) <= 2 * data.max_prompt_tokens:
        token_ids = encode(text)
    return np.asarray(token_ids, dtype=np.int32)


def _template_arguments(tools: list[dict[str, Any]], row: DataRow, data: DataSection) -> dict[str, Any]:
    """Return the settings' arguments of the template with the row's own over them, and the tools of a request below both."""
    arguments, field = data.template_arguments, data.template_arguments_field
    if tools:
        arguments = {"tools": tools, **arguments}
    if not field:
        return arguments
    own = _field(row, "data.template_arguments_field", field)
    if not isinstance(own, dict | None):
        problem = f"in {row.place} it is of type {type(own).__name__}"
        raise SettingError("data.template_arguments_field", field, problem, "Choose a field that holds an object.")
    # Tables hold every argument of any row in each row, with null where a row lacks it.
    return {**arguments, **{name: value for name, value in (own or {}).items() if value is not None}}


def image_folder(source: str) -> Path | None:
    """Return the folder that paths of images are relative to: a file's own, or the data folder; None for other sources."""
    path = Path(source).expanduser()
    if is_function(source) or not path.exists():
        return None
    return (path if path.is_dir() else path.parent).resolve()


def render_with_images(
    row: DataRow, data: DataSection, tokenizer: PreTrainedTokenizerBase, reader: ImageReader, folder: Path | None
) -> tuple[str, NDArray[np.int32], tuple[ImageFile, ...]]:
    """Return a row's prompt as `render` does, and its images; raise `SettingError` that names the row where it cannot be used.

    The token ids have the image token once for each token of an image.
    """
    placeholder = "".join(tokenizer.convert_ids_to_tokens(list(reader.placeholder_ids)))
    prompt = _replaced(row.fields.get(data.prompt_field), MARKER, placeholder)
    marked = row._replace(fields=row.fields | {data.prompt_field: prompt}) if data.prompt_field in row.fields else row
    text, token_ids = render(marked, data, tokenizer)
    images = _read_images(row, data.image_field, reader, folder)
    is_image = token_ids == reader.image_token_id
    if int(is_image.sum()) != len(images):
        problem = f"the prompt of {row.place} has {int(is_image.sum())} places for images, and the row names {len(images)}"
        raise SettingError(SETTING, data.image_field, problem, f"Write {MARKER} in the prompt once for each image.")
    lengths = np.ones(len(token_ids), dtype=np.int64)
    lengths[is_image] = [image.num_tokens for image in images]
    return text.replace(placeholder, MARKER), np.repeat(token_ids, lengths), images


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
        raise SettingError(SETTING, field, f"in {row.place} it is of type {type(named).__name__}", cure)
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
