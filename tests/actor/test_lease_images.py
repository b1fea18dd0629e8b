"""An actor takes a lease's images only if they are those that the learner announced."""

from pathlib import Path

import numpy as np
import pytest

from offbeat.actor.leases_at_work import read_images
from offbeat.common.models.images import ImageError, ImageFile, ImageReader, hash_image
from offbeat.learner.dispatch.send_queue import Offer
from offbeat.learner.leases.prompts import Prompt
from offbeat.protocols.messages import Lease, Sampling
from offbeat.protocols.payload import ImageReference
from offbeat.protocols.wire import WireError, decode_from_learner, encode
from tests.common.models.test_images import encoded

FILES = (encoded(56, 28), encoded(28, 28, "JPEG"))
SAMPLING = Sampling(max_new_tokens=1)


@pytest.fixture(scope="module")
def reader(tiny_vision_model: Path) -> ImageReader:
    return ImageReader(tiny_vision_model)


def lease_of(*files: bytes) -> Lease:
    images = tuple(ImageReference(len(file), hash_image(file)) for file in files)
    return Lease(1, 2, 1, SAMPLING, 0, 9.0, "x", "{}", images=images)


def prompt_of(reader: ImageReader, *lengths: int) -> list[int]:
    return [5, *(token for length in lengths for token in (*[reader.image_token_id] * length, 6))]


def test_images_arrive_as_the_learner_sent_them(reader: ImageReader) -> None:
    images = read_images(lease_of(*FILES), prompt_of(reader, 2, 1), b"".join(FILES), reader)
    assert [(image.rows, image.columns, image.hash) for image in images] == [
        (2, 4, hash_image(FILES[0])),
        (2, 2, hash_image(FILES[1])),
    ]
    assert read_images(lease_of(), [5], b"", None) == ()


def test_bytes_that_the_hash_does_not_name_are_refused(reader: ImageReader) -> None:
    content = bytearray(b"".join(FILES))
    content[-1] ^= 1
    with pytest.raises(ImageError, match="image 1 is not the one that the learner announced"):
        read_images(lease_of(*FILES), prompt_of(reader, 2, 1), bytes(content), reader)


def test_tokens_must_be_those_of_the_images(reader: ImageReader) -> None:
    with pytest.raises(ImageError, match="the prompt has 2 tokens of images, and its images make 3"):
        read_images(lease_of(*FILES), prompt_of(reader, 1, 1), b"".join(FILES), reader)


def test_actor_without_images_refuses_them() -> None:
    with pytest.raises(ImageError, match=r"takes no images: give it the learner's data\.image_field"):
        read_images(lease_of(*FILES), [5], b"".join(FILES), None)


def test_offer_carries_hashes_and_files(tmp_path: Path) -> None:
    made = []
    for index, content in enumerate(FILES):
        path = tmp_path / str(index)
        path.write_bytes(content)
        made.append(ImageFile(str(path), hash_image(content), len(content), 1))
    prompt = Prompt(0, "x", np.array([5, 6], dtype=np.int32), "{}", images=tuple(made))
    offer = Offer(1, prompt, 2, SAMPLING, 0)
    message, arrays = decode_from_learner(encode(offer.lease(9.0), *offer.arrays()))
    assert isinstance(message, Lease)
    assert message.images == tuple(ImageReference(len(file), hash_image(file)) for file in FILES)
    assert bytes(arrays[1]) == b"".join(FILES)
    frames = encode(offer.lease(9.0), *offer.arrays())
    with pytest.raises(WireError, match="bytes of images announced"):
        decode_from_learner([*frames[:3], bytes(frames[3])[:-1]])
    with pytest.raises(WireError, match="2 array frames, got 1"):
        decode_from_learner(frames[:3])


def test_lease_without_images_has_the_bytes_it_had() -> None:
    prompt = Prompt(0, "x", np.array([5, 6], dtype=np.int32), "{}")
    offer = Offer(1, prompt, 2, SAMPLING, 0)
    assert len(offer.arrays()) == 1
    decoded, arrays = decode_from_learner(encode(offer.lease(9.0), *offer.arrays()))
    assert isinstance(decoded, Lease)
    assert (decoded.images, len(arrays)) == ((), 1)
