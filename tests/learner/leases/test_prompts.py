"""Prompts are read and tokenized with errors that say where."""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import DataSection
from offbeat.learner.leases.prompts import LoadedPrompts, Prompt, load_prompts


class CharacterTokenizer:
    """A tokenizer with one token per character, which begins a text with token 1 unless special tokens are off."""

    eos_token_id = None

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool, mood: str = ""
    ) -> str:
        assert not tokenize
        return mood + "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>" * add_generation_prompt


class BareTokenizer(CharacterTokenizer):
    """A tokenizer that adds no special token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text, add_special_tokens=False)


CHARACTERS: Any = CharacterTokenizer()


def load(
    source: Path | str, data: DataSection | None = None, tokenizer: Any = CHARACTERS, split: str = "train"
) -> LoadedPrompts:
    return load_prompts(str(source), split, data or DataSection(), tokenizer)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def decode(prompt: Prompt) -> str:
    return "".join(chr(token) for token in prompt.token_ids)


def test_each_row_becomes_a_prompt_with_its_text_tokens_and_row(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "ab", "answer": "ba"}', "", '{"prompt": "é", "n": 2}')
    prompts, num_dropped = load(path)
    assert num_dropped == 0
    assert [(prompt.prompt_id, prompt.text) for prompt in prompts] == [(0, "ab"), (1, "é")]
    assert prompts[0].token_ids.dtype == np.int32
    assert prompts[0].token_ids.tolist() == [1, 97, 98]
    assert msgspec.json.decode(prompts[1].row) == {"prompt": "é", "n": 2}


def test_task_of_a_row_goes_with_its_prompt(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a", "task": "sums"}', '{"prompt": "b", "task": "letters"}')
    assert [prompt.task for prompt in load(path, DataSection(task_field="task")).prompts] == ["sums", "letters"]
    assert [prompt.task for prompt in load(path).prompts] == ["", ""]


@pytest.mark.parametrize("row", ['{"prompt": "b"}', '{"prompt": "b", "task": 3}', '{"prompt": "b", "task": "a b"}'])
def test_row_without_a_name_of_its_task_is_an_error(row: str, tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a", "task": "sums"}', row)
    with pytest.raises(SettingError, match=r"^data\.task_field = .*rows\.jsonl:2"):
        load(path, DataSection(task_field="task"))


def test_more_tasks_than_can_be_shown_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, *(f'{{"prompt": "a", "task": "t{number}"}}' for number in range(33)))
    with pytest.raises(SettingError, match="more than 32 tasks"):
        load(path, DataSection(task_field="task"))


def test_chat_template_wraps_the_prompt_and_the_tokenizer_adds_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "2+2?"}')
    data = DataSection(prompt_field="question", chat_template=True, system_prompt="Think.")
    ((prompt,), _) = load(path, data, CharacterTokenizer("a template"))
    assert decode(prompt) == "<system>Think.<user>2+2?<assistant>"
    assert prompt.text == "2+2?"


def test_without_a_system_prompt_there_is_no_system_message(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "hi"}')
    ((prompt,), _) = load(path, DataSection(chat_template=True), CharacterTokenizer("a template"))
    assert decode(prompt) == "<user>hi<assistant>"


def test_real_tokenizer_with_a_chat_template(tiny_bpe_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_bpe_model)
    ((prompt,), _) = load(write(tmp_path, '{"prompt": "What is 2 + 2?"}'), DataSection(chat_template=True), tokenizer)
    rendered = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.token_ids.tolist()) == rendered
    assert prompt.token_ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_too_long_prompt_is_an_error_that_names_the_row_and_the_cure(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "ab"}', '{"prompt": "abc"}')
    expected = re.escape(f"data.max_prompt_tokens = 3: the prompt of {path}:2 has 4 tokens. ") + ".*long_prompts"
    with pytest.raises(SettingError, match=expected):
        load(path, DataSection(max_prompt_tokens=3))


class HeardTokenizer(CharacterTokenizer):
    """Notes the length of each text that it tokenizes; blanks are no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[int] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.heard.append(len(text))
        return super().encode(text.replace(" ", ""), add_special_tokens=add_special_tokens)


def test_of_a_text_of_megabytes_only_the_beginning_is_tokenized(tmp_path: Path) -> None:
    tokenizer = HeardTokenizer()
    path = write(tmp_path, f'{{"prompt": "{"a" * 8_000_000}"}}')
    with pytest.raises(SettingError, match=r":1 has at least 193 tokens\. "):
        load(path, DataSection(max_prompt_tokens=3), tokenizer)
    assert tokenizer.heard == [192]


def test_long_text_of_few_tokens_is_a_prompt(tmp_path: Path) -> None:
    path = write(tmp_path, f'{{"prompt": "{" " * 1_000}ab"}}')
    ((prompt,), _) = load(path, DataSection(max_prompt_tokens=3), tokenizer := HeardTokenizer())
    assert len(prompt.token_ids) == 3
    assert tokenizer.heard == [192, 1_002]


def test_too_long_prompts_are_left_out_and_counted_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "abc"}', '{"prompt": "ab"}', '{"prompt": "abcd"}')
    prompts, num_dropped = load(path, DataSection(max_prompt_tokens=3, long_prompts="drop"))
    assert [(prompt.prompt_id, prompt.text) for prompt in prompts] == [(0, "ab")]
    assert num_dropped == 2


def test_data_of_which_nothing_is_left_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "abcd"}')
    with pytest.raises(SettingError, match="all 1 prompts are too long"):
        load(path, DataSection(max_prompt_tokens=3, long_prompts="drop"))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['{"prompt": "a"}', '{"prompt": '], r"rows\.jsonl:2 is not a JSON object"),
        (['["a"]'], r"rows\.jsonl:1 is not a JSON object \(Expected `object`, got `array`\)"),
        (['{"question": "a", "answer": "b"}'], r'prompt_field = "prompt": .*rows\.jsonl:1.*Its fields are: question, answer'),
        (['{"prompt": 7}'], r"rows\.jsonl:1 it is of type int"),
        ([""], "there are no rows"),
    ],
)
def test_malformed_data_is_an_error_that_says_where(lines: list[str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=problem):
        load(write(tmp_path, *lines))


def test_empty_prompt_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": ""}')
    with pytest.raises(SettingError, match=r"rows\.jsonl:1 has an empty prompt"):
        load(path, tokenizer=BareTokenizer())


def test_missing_file_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(SettingError, match=r'data\.eval_data = "absent\.jsonl": cannot be read \(No such file'):
        load_prompts("absent.jsonl", "test", DataSection(), CHARACTERS, setting="data.eval_data")


def test_missing_chat_template_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}')
    with pytest.raises(SettingError, match=r"data\.chat_template = true: the tokenizer has no chat template"):
        load(path, DataSection(chat_template=True))


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a Hugging Face dataset in a folder, the only kind that needs no hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "questions"
    folder.mkdir()
    (folder / "train.csv").write_text("prompt,answer\nab,1\ncd,2\n")
    return folder


def test_dataset_is_read_by_name_and_split(dataset: Path) -> None:
    prompts, _ = load(dataset)
    assert [prompt.text for prompt in prompts] == ["ab", "cd"]
    assert msgspec.json.decode(prompts[1].row) == {"prompt": "cd", "answer": 2}


def test_dataset_without_the_split_is_an_error(dataset: Path) -> None:
    with pytest.raises(SettingError, match="split 'test' cannot be loaded"):
        load(dataset, split="test")


def test_share_left_out_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "abc"}', '{"prompt": "ab"}', '{"prompt": "abcd"}')
    loaded = load(path, DataSection(max_prompt_tokens=3, long_prompts="drop"))
    assert loaded.share_dropped == 2 / 3
    assert loaded.dropped_text().startswith("2 of 3 prompts (67%) are left out")
