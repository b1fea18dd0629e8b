"""The images of a lease: files that travel beside it, compared with their hashes before they are decoded."""

import numpy as np

from offbeat.common.models.images import ImageError, ImagePatches, ImageReader, hash_image
from offbeat.protocols.messages import Lease
from offbeat.protocols.wire import Frame


def read_images(
    lease: Lease, prompt_token_ids: list[int], files: Frame, reader: ImageReader | None
) -> tuple[ImagePatches, ...]:
    """Return the images of a lease; raise `ImageError` where one is not what the learner announced, or cannot be decoded.

    `files` are as long as announced: `protocols.wire` has checked that.
    """
    if not lease.images:
        return ()
    if reader is None:
        raise ImageError("this actor takes no images: give it the learner's task.image_field")
    images: list[ImagePatches] = []
    start = 0
    for index, reference in enumerate(lease.images):
        content = bytes(files[start : start + reference.num_bytes])
        start += reference.num_bytes
        if hash_image(content) != reference.hash:
            raise ImageError(f"image {index} is not the one that the learner announced")
        images.append(reader.read(content))
    reader.check_prompt(np.array(prompt_token_ids, dtype=np.int32), images)
    return tuple(images)
