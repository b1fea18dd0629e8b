"""Names match one pattern; free text arrives on one line of printable characters."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.protocols.messages import LeaseFailed, Refused
from offbeat.protocols.text import MAX_CHARACTERS, as_name, is_name, plain
from offbeat.protocols.wire import WireError, decode_from_actor, decode_from_learner, encode
from tests.protocols.sample_messages import FROM_ACTOR, as_sent


@pytest.mark.parametrize("name", ["actor-0", "gpu.example.org-17", "me@host", "A", "a" * 128])
def test_usual_names_match(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize(
    "name", ["", "-a", ".", "../a", "a/b", "a b", "a\n", "a\x1b[31m", "\u00e9", "a\u202eb", "a" * 129, "[red]"]
)
def test_text_that_could_command_a_terminal_or_leave_a_folder_is_no_name(name: str) -> None:
    assert not is_name(name)


@given(st.text())
def test_any_text_of_the_machine_becomes_a_name(text: str) -> None:
    assert is_name(as_name(text))
    assert not is_name(text) or as_name(text) == text


def test_unprintable_characters_are_shown_as_escapes() -> None:
    assert plain("bell\a, red \x1b[31m, line\nline, \u202egnp.exe, tab\t") == (
        "bell\\x07, red \\x1b[31m, line\\nline, \\u202egnp.exe, tab\\t"
    )
    assert plain("größer [1/2] \U0001f600") == "größer [1/2] \U0001f600"


@given(st.text(st.characters(), max_size=50) | st.text("\n\x1b\u2028\u202e\ud800", max_size=50))
def test_any_text_becomes_one_printable_line(text: str) -> None:
    shown = plain(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1
    assert plain(shown) == shown


def test_long_text_is_cut() -> None:
    assert plain("x" * 5 + "y", 5) == "xxxxx..."
    assert len(plain("x" * 10**6)) == MAX_CHARACTERS + 3


@pytest.mark.parametrize("kind", ["Hello", "LeaseFailed", "LiveSettingsRequest"])
def test_name_outside_the_pattern_is_refused_in_a_message(kind: str) -> None:
    message = next(message for message, _ in FROM_ACTOR if type(message).__name__ == kind)
    field = {"Hello": "actor", "LeaseFailed": "reason", "LiveSettingsRequest": "who"}[kind]
    for name in ("a\nb", "\x1b]0;title\x07", "[bold]x", "../../x"):
        frames = as_sent(encode(msgspec.structs.replace(message, **{field: name})))
        with pytest.raises(WireError, match="malformed"):
            decode_from_actor(frames)


def test_free_text_is_kept_and_made_plain_on_both_sides() -> None:
    failed = LeaseFailed(lease_id=1, reason="reward_error", detail="boom\n2026 INFO learner all is well\x1b[2J")
    (message, _) = decode_from_actor(as_sent(encode(failed)))
    assert isinstance(message, LeaseFailed)
    assert message.detail == "boom\\n2026 INFO learner all is well\\x1b[2J"
    (refused, _) = decode_from_learner(as_sent(encode(Refused(reason="a\rb"))))
    assert isinstance(refused, Refused)
    assert refused.reason == "a\\rb"


def test_text_of_a_refusal_quotes_no_raw_bytes_of_the_sender() -> None:
    frames = as_sent(encode(Refused(reason="x")))
    frames[1] = frames[1].replace(b"reason", b"rea\x1b[3").replace(b"Refused", b"Goodbye")
    with pytest.raises(WireError) as refusal:
        decode_from_actor(frames)
    assert str(refusal.value).isprintable()
