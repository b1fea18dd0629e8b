"""Image files are bounded before they are decoded, and what is no image is refused with the reason."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.models import images
from offbeat.common.models.images import ImageError, ImageFile, ImageReader, hash_image, open_image

Image = pytest.importorskip("PIL.Image")


def encoded(width: int, height: int, kind: str = "PNG", color: tuple[int, ...] = (9, 99, 199)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB" if len(color) == 3 else "RGBA", (width, height), color).save(file, kind)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a hundred bytes whose header claims that many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_formats_are_told_by_content(kind: str) -> None:
    image = open_image(encoded(30, 20, kind))
    assert (image.size, image.mode) == ((30, 20), "RGB")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_photo_is_turned_as_its_camera_was(kind: str) -> None:
    photo = Image.new("RGB", (48, 32), (255, 0, 0))
    photo.paste((0, 0, 255), (24, 0, 48, 32))
    exif = Image.Exif()
    # The camera was turned: the right side of what is stored is up.
    exif[0x0112] = 8
    file = io.BytesIO()
    photo.save(file, kind, exif=exif)
    turned = open_image(file.getvalue())
    assert (turned.size, turned.mode) == ((32, 48), "RGB")
    top, bottom = np.asarray(turned)[[4, 44], 16]
    assert top[2] > 200 > 50 > top[0]
    assert bottom[0] > 200 > 50 > bottom[2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an image"),
        (b"{}", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (encoded(8, 8, "GIF"), "not an image in one of the formats PNG, JPEG, WEBP"),
        (encoded(60, 60)[:80], "cannot be decoded"),
        (encoded(200, 200, "JPEG")[:500], "cannot be decoded"),
        (bomb(5000, 5000), "5000 x 5000 pixels, more than"),
        (bomb(60_000, 60_000), "cannot be decoded|pixels"),
        (b"\0" * (images.MAX_PROMPT_BYTES + 1), "bytes, more than"),
    ],
    ids=["empty", "json", "postscript", "gif", "cut_png", "cut_jpeg", "pixels", "bomb", "bytes"],
)
def test_what_is_no_usable_image_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        open_image(content)


def test_pixels_are_counted_before_any_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="pixels"):
        open_image(bomb(5000, 5000))


def test_changed_or_missing_file_of_a_prompt_ends_the_service(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    content = encoded(28, 28)
    path.write_bytes(content)
    file = ImageFile(str(path), hash_image(content), len(content), 1)
    assert file.read() == content
    path.write_bytes(encoded(28, 28, color=(1, 2, 3)))
    with pytest.raises(ServiceError, match=r"a\.png has changed since the run began"):
        file.read()
    path.unlink()
    with pytest.raises(ServiceError, match="cannot be read any more"):
        file.read()


def test_patches_are_normalized_and_counted_in_tokens(tiny_vision_model: Path) -> None:
    reader = ImageReader(tiny_vision_model)
    patches = reader.read(encoded(84, 56))
    assert (patches.rows, patches.columns, reader.num_tokens(patches)) == (4, 6, 6)
    assert patches.values.shape == (24, reader.patch_numbers)
    # CLIP's mean and deviation of red, the first channel of a patch.
    assert patches.values[0, 0] == pytest.approx((9 / 255 - 0.48145466) / 0.26862954, abs=1e-5)
    # Larger images are made smaller.
    assert reader.num_tokens(reader.read(encoded(1000, 500))) <= reader.largest_image == 16
    with pytest.raises(ImageError, match="processor refuses it"):
        reader.read(encoded(2001, 10))


def test_prompt_must_have_the_tokens_of_its_images(tiny_vision_model: Path) -> None:
    reader = ImageReader(tiny_vision_model)
    image = reader.read(encoded(56, 28))
    reader.check_prompt(np.array([5, reader.image_token_id, reader.image_token_id], dtype=np.int32), [image])
    with pytest.raises(ImageError, match="1 tokens of images, and its images make 2"):
        reader.check_prompt(np.array([5, reader.image_token_id], dtype=np.int32), [image])


def test_model_without_images_is_refused(tiny_model: Path) -> None:
    with pytest.raises(SettingError, match="the model is a qwen3, and images are supported for qwen2_5_vl, qwen3_vl"):
        ImageReader(tiny_model)
