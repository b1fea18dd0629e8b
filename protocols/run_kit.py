"""The run as the learner hands it to an actor that has neither its settings nor its model: one blob, sent in parts.

Never code, never weights: names of files have no folder, and only the endings of a model's small files.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from offbeat.protocols.fields import Label

PART_BYTES = 512 << 10
"""Size of every part but the last. A hub takes frames of at least 1 MB (`hub.max_message_mb`)."""
MAX_PARTS = 512
"""Most parts: 256 MB. The largest tokenizers have some 40 MB."""
MAX_SETTINGS_CHARACTERS = 1 << 20
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.(json|jinja|txt|model)\Z")]

_encoder = msgspec.msgpack.Encoder()


class RunKit(msgspec.Struct, frozen=True):
    """Everything that an actor is started with. A newer release may add fields."""

    software: Label
    """The learner's version of offbeat."""
    settings: Annotated[str, Meta(max_length=MAX_SETTINGS_CHARACTERS)]
    """The run's settings as TOML, without those of the learner's machine and without secrets."""
    files: Annotated[dict[FileName, bytes], Meta(max_length=64)]
    """Contents of the model's small files, by name: config, tokenizer, chat template, image processor."""


class RunKitError(ValueError):
    """Bytes that are no kit; the text says why."""


_decoder = msgspec.msgpack.Decoder(RunKit)


def encode_kit(kit: RunKit) -> bytes:
    """Return the kit as bytes; raise `RunKitError` for one that no actor would take."""
    content = _encoder.encode(kit)
    if len(content) > MAX_PARTS * PART_BYTES:
        raise RunKitError(f"the model's small files have {len(content) >> 20} MB, more than {MAX_PARTS * PART_BYTES >> 20}")
    decode_kit(content)
    return content


def decode_kit(content: bytes | bytearray) -> RunKit:
    """Return the kit in these bytes, with all names and sizes checked."""
    try:
        return _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RunKitError(f"malformed: {error}") from error
