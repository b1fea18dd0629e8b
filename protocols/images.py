"""The images of a lease: their sizes and hashes. The files travel in a frame beside the lease."""

import msgspec

from offbeat.protocols.fields import Checksum, Positive

MAX_IMAGES = 16
"""Most images of one prompt."""


class ImageReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One image of a lease's prompt."""

    num_bytes: Positive
    hash: Checksum
    """`common.models.images.hash_image` of the file's bytes."""
