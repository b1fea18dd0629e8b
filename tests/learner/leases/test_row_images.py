"""Rows name image files; each takes the place of `<image>` in the prompt, with as many tokens as the model makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.models.images import MAX_PROMPT_BYTES
from offbeat.common.settings.config import DataSection
from offbeat.learner.leases.prompts import Prompt, load_prompts

Image = pytest.importorskip("PIL.Image")
PAD, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"


@pytest.fixture(scope="module")
def tokenizer(tiny_vision_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_vision_model)


def save(path: Path, width: int, height: int, color: int = 100) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (width, height), (color, color, color)).save(path)


def prompts_of(folder: Path, tokenizer: Any, *rows: dict[str, Any], **task: Any) -> list[Prompt]:
    file = folder / "data.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    section = DataSection(**{"train_data": str(file), "image_field": "image", **task})
    return load_prompts(str(file), "train", section, tokenizer).prompts


def test_images_become_as_many_tokens_as_they_have_squares(tmp_path: Path, tokenizer: Any) -> None:
    save(tmp_path / "images" / "a.png", 84, 56)
    save(tmp_path / "b.jpg", 28, 28)
    two, one, none = prompts_of(
        tmp_path,
        tokenizer,
        {"prompt": "x<image>y<image>", "image": ["images/a.png", "b.jpg"]},
        {"prompt": "<image>", "image": str(tmp_path / "b.jpg")},
        {"prompt": "z", "image": None},
    )
    assert tokenizer.decode(two.token_ids) == f"x{START}{PAD * 6}{END}y{START}{PAD}{END}"
    assert [image.num_tokens for image in two.images] == [6, 1]
    assert two.text == "x<image>y<image>"
    assert tokenizer.decode(one.token_ids) == f"{START}{PAD}{END}"
    assert (tokenizer.decode(none.token_ids), none.images) == ("z", ())


def test_conversations_have_images_too(tmp_path: Path, tokenizer: Any) -> None:
    save(tmp_path / "a.png", 28, 28)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    messages = [
        {"role": "user", "content": "a<image>"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    (prompt,) = prompts_of(tmp_path, tokenizer, {"prompt": messages, "image": "a.png"}, chat_template=True)
    assert tokenizer.decode(prompt.token_ids) == f"a{START}{PAD}{END}=b=c="


def test_another_image_under_the_same_name_is_another_prompt(tmp_path: Path, tokenizer: Any) -> None:
    row = {"prompt": "<image>", "image": "a.png"}
    save(tmp_path / "a.png", 28, 28)
    (before,) = prompts_of(tmp_path, tokenizer, row)
    (again,) = prompts_of(tmp_path, tokenizer, row)
    save(tmp_path / "a.png", 28, 28, color=101)
    (after,) = prompts_of(tmp_path, tokenizer, row)
    assert before.content_hash == again.content_hash != after.content_hash
    assert before.token_ids.tolist() == after.token_ids.tolist()


@pytest.mark.parametrize(
    ("prompt", "image", "reason"),
    [
        ("<image>", None, "has 1 places for images, and the row names 0"),
        ("none", "a.png", "has 0 places for images, and the row names 1"),
        (f"<image>{PAD}", "a.png", "has 2 places for images, and the row names 1"),
        ("<image>", "missing.png", r"'missing.png' of .*data.jsonl:1 cannot be read \(No such file"),
        ("<image>", "text.png", "'text.png' of .*data.jsonl:1 cannot be used: it is not an image"),
        ("<image>", "huge.png", f"huge.png.* more than {MAX_PROMPT_BYTES}"),
        ("<image>", ["a.png", 3], "it is of type list"),
        ("<image>" * 17, ["a.png"] * 17, "has 17 images"),
    ],
)
def test_row_whose_images_cannot_be_used_is_named(
    tmp_path: Path, tokenizer: Any, prompt: str, image: object, reason: str
) -> None:
    save(tmp_path / "a.png", 28, 28)
    (tmp_path / "text.png").write_text("no image")
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(MAX_PROMPT_BYTES + 1)
    with pytest.raises(SettingError, match=reason):
        prompts_of(tmp_path, tokenizer, {"prompt": prompt, "image": image})


def test_length_of_a_prompt_counts_the_tokens_of_its_images(tmp_path: Path, tokenizer: Any) -> None:
    save(tmp_path / "a.png", 84, 56)
    with pytest.raises(SettingError, match="has 8 tokens"):
        prompts_of(tmp_path, tokenizer, {"prompt": "<image>", "image": "a.png"}, max_prompt_tokens=7)
