"""Join settings are settings and small files of a model, never a path, code or weights."""

import msgspec
import pytest

from offbeat.protocols import message_parts as run_kit
from offbeat.protocols.message_parts import (
    PART_BYTES,
    JoinSettings,
    JoinSettingsError,
    decode_join_settings,
    encode_join_settings,
)

JOIN = JoinSettings("0.1.0", "[model]\n", {"config.json": b"{}", "chat_template.jinja": b"\x00\xff", "tokenizer.model": b""})


def test_kit_comes_back_as_it_was_and_a_newer_release_may_add_fields() -> None:
    assert decode_join_settings(encode_join_settings(JOIN)) == JOIN
    newer = msgspec.msgpack.encode(msgspec.to_builtins(JOIN, builtin_types=(bytes,)) | {"since_tomorrow": 1})
    assert decode_join_settings(newer) == JOIN


@pytest.mark.parametrize(
    "name",
    [
        "../config.json",
        "a/config.json",
        "/etc/config.json",
        "..json",
        ".json",
        "config.json\n",
        "model.safetensors",
        "pytorch_model.bin",
        "modeling.py",
        "config",
        "a" * 101 + ".json",
        "a\\b.json",
    ],
)
def test_file_outside_the_folder_code_and_weights_are_refused(name: str) -> None:
    with pytest.raises(JoinSettingsError, match="malformed"):
        decode_join_settings(msgspec.msgpack.encode(JoinSettings("0", "", {name: b""})))


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80", b"[" * 9999, msgspec.msgpack.encode({"software": 1})])
def test_other_bytes_are_no_kit(content: bytes) -> None:
    with pytest.raises(JoinSettingsError):
        decode_join_settings(content)


def test_files_that_no_actor_would_take_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_kit, "MAX_PARTS", 4)
    with pytest.raises(JoinSettingsError, match="have 2 MB, more than 2"):
        encode_join_settings(JoinSettings("0", "", {"tokenizer.json": bytes(4 * PART_BYTES)}))
    with pytest.raises(JoinSettingsError, match="malformed"):
        encode_join_settings(JoinSettings("0", "", {f"{number}.json": b"" for number in range(65)}))
