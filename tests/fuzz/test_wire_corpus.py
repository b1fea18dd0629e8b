"""The claims about the wire's decoder hold for every input that the fuzzer kept, without the fuzzer."""

from pathlib import Path

import pytest

from offbeat.protocols.messages import ActorMessage, LearnerMessage
from tests.fuzz.wire_claims import check_frames, pack, unpack

CORPUS = sorted((Path(__file__).parent / "corpus/wire").iterdir())


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_input_is_a_message_or_a_wire_error(path: Path) -> None:
    check_frames(path.read_bytes())


def test_corpus_has_a_message_of_every_type() -> None:
    kinds = {type(packet.message) for packet in map(check_frames, (path.read_bytes() for path in CORPUS)) if packet is not None}
    assert kinds == {*ActorMessage.__args__, *LearnerMessage.__args__}


def test_input_is_unpacked_as_it_was_packed() -> None:
    packed = pack(True, 1, [b"body", b"", b"\0" * 300])
    assert unpack(packed) == (True, 1, [b"body", b"", b"\0" * 300])
    assert unpack(packed[:-1])[2][-1] == b"\0" * 299
