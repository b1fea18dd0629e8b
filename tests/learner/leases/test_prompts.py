"""Prompts are read and tokenized with errors that say where; the stream serves every prompt once an epoch."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.config import TaskSection
from offbeat.common.settings import SettingError
from offbeat.learner.leases.prompts import LoadedPrompts, Prompt, PromptStream, StreamState, Turn, load_prompts


class CharacterTokenizer:
    """A tokenizer with one token per character, which begins a text with token 1 unless special tokens are off."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>" * add_generation_prompt


class BareTokenizer(CharacterTokenizer):
    """A tokenizer that adds no special token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text, add_special_tokens=False)


CHARACTERS: Any = CharacterTokenizer()


def load(
    source: Path | str, task: TaskSection | None = None, tokenizer: Any = CHARACTERS, split: str = "train"
) -> LoadedPrompts:
    return load_prompts(str(source), split, task or TaskSection(), tokenizer)


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


def test_chat_template_wraps_the_prompt_and_the_tokenizer_adds_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "2+2?"}')
    task = TaskSection(prompt_field="question", chat_template=True, system_prompt="Think.")
    ((prompt,), _) = load(path, task, CharacterTokenizer("a template"))
    assert decode(prompt) == "<system>Think.<user>2+2?<assistant>"
    assert prompt.text == "2+2?"


def test_without_a_system_prompt_there_is_no_system_message(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "hi"}')
    ((prompt,), _) = load(path, TaskSection(chat_template=True), CharacterTokenizer("a template"))
    assert decode(prompt) == "<user>hi<assistant>"


def test_real_tokenizer_with_a_chat_template(tiny_bpe_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_bpe_model)
    ((prompt,), _) = load(write(tmp_path, '{"prompt": "What is 2 + 2?"}'), TaskSection(chat_template=True), tokenizer)
    rendered = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.token_ids.tolist()) == rendered
    assert prompt.token_ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_too_long_prompt_is_an_error_that_names_the_row_and_the_cure(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "ab"}', '{"prompt": "abc"}')
    expected = re.escape(f"task.max_prompt_tokens = 3: the prompt of {path}:2 has 4 tokens. ") + ".*long_prompts"
    with pytest.raises(SettingError, match=expected):
        load(path, TaskSection(max_prompt_tokens=3))


def test_too_long_prompts_are_left_out_and_counted_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "abc"}', '{"prompt": "ab"}', '{"prompt": "abcd"}')
    prompts, num_dropped = load(path, TaskSection(max_prompt_tokens=3, long_prompts="drop"))
    assert [(prompt.prompt_id, prompt.text) for prompt in prompts] == [(0, "ab")]
    assert num_dropped == 2


def test_data_of_which_nothing_is_left_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "abcd"}')
    with pytest.raises(SettingError, match="all 1 prompts are too long"):
        load(path, TaskSection(max_prompt_tokens=3, long_prompts="drop"))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['{"prompt": "a"}', '{"prompt": '], r"rows\.jsonl:2 is not a JSON object"),
        (['["a"]'], r"rows\.jsonl:1 is not a JSON object \(Expected `object`, got `array`\)"),
        (['{"question": "a", "answer": "b"}'], r'prompt_field = "prompt": .*rows\.jsonl:1.*Its fields are: question, answer'),
        (['{"prompt": 7}'], r"rows\.jsonl:1 it is a int"),
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
    with pytest.raises(SettingError, match=r'task\.eval_data = "absent\.jsonl": cannot be read \(No such file'):
        load_prompts("absent.jsonl", "test", TaskSection(), CHARACTERS, setting="task.eval_data")


def test_missing_chat_template_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}')
    with pytest.raises(SettingError, match=r"task\.chat_template = true: the tokenizer has no chat template"):
        load(path, TaskSection(chat_template=True))


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


def drain(stream: PromptStream, count: int) -> list[int]:
    return [turn.prompt_id for turn in drain_turns(stream, count)]


def drain_turns(stream: PromptStream, count: int) -> list[Turn]:
    return [stream.next() for _ in range(count)]


@given(num_prompts=st.integers(1, 20), seed=st.integers(0, 2**63), epochs=st.integers(1, 4))
def test_every_epoch_serves_every_prompt_once(num_prompts: int, seed: int, epochs: int) -> None:
    stream = PromptStream(num_prompts, seed)
    for _ in range(epochs):
        assert sorted(drain(stream, num_prompts)) == list(range(num_prompts))
    assert stream.position == epochs * num_prompts


def test_epochs_and_seeds_differ_in_their_order() -> None:
    first, second = PromptStream(50, seed=0), PromptStream(50, seed=1)
    orders = [drain(first, 50), drain(first, 50), drain(second, 50)]
    assert len({tuple(order) for order in orders}) == 3


@given(num_prompts=st.integers(1, 9), seed=st.integers(0, 99), position=st.integers(0, 40))
def test_order_is_a_function_of_seed_and_position(num_prompts: int, seed: int, position: int) -> None:
    whole = PromptStream(num_prompts, seed)
    drain(whole, position)
    assert drain(PromptStream(num_prompts, seed, position), 20) == drain(whole, 20)


def test_prompts_given_back_come_first_and_oldest_first() -> None:
    stream = PromptStream(5, seed=0)
    first, second, third = drain(stream, 3)
    stream.give_back(third, 0)
    stream.give_back(first, 0)
    assert drain(stream, 2) == [third, first]
    assert stream.position == 3
    assert sorted([first, second, third, *drain(stream, 2)]) == [0, 1, 2, 3, 4]


@given(position=st.integers(0, 12), num_returned=st.integers(0, 2))
def test_peeking_serves_nothing(position: int, num_returned: int) -> None:
    stream = PromptStream(4, seed=0, position=position)
    for prompt_id in range(num_returned):
        stream.give_back(prompt_id, 0)
    before = stream.state()
    assert stream.peek() == stream.peek()
    assert stream.state() == before
    assert stream.peek() == stream.next()


def test_prompt_keeps_the_pass_it_belongs_to_when_it_is_given_back() -> None:
    stream = PromptStream(3, seed=0)
    turns = drain_turns(stream, 5)
    assert [turn.epoch for turn in turns] == [0, 0, 0, 1, 1]
    stream.give_back(*turns[1])
    stream.give_back(*turns[4])
    rest = ({0, 1, 2} - {turns[3].prompt_id, turns[4].prompt_id}).pop()
    assert drain_turns(stream, 3) == [turns[1], turns[4], Turn(rest, 1)]
    assert stream.epoch == 2
    assert stream.share_served == 0.0


@given(num_prompts=st.integers(1, 8), gives_back=st.lists(st.booleans(), max_size=60))
def test_each_prompt_is_served_once_an_epoch_and_once_more_for_each_return(num_prompts: int, gives_back: list[bool]) -> None:
    stream = PromptStream(num_prompts, seed=3)
    served: Counter[int] = Counter()
    returned: Counter[int] = Counter()
    for is_given_back in gives_back:
        turn = stream.next()
        served[turn.prompt_id] += 1
        if is_given_back:
            stream.give_back(*turn)
            returned[turn.prompt_id] += 1
    served.update(drain(stream, len(stream.state().returned)))
    assert served - returned == Counter(drain(PromptStream(num_prompts, seed=3), stream.position))


@given(served=st.integers(0, 12), returns=st.integers(0, 4), num_prompts=st.integers(1, 6))
def test_restored_stream_goes_on_as_the_saved_one(served: int, returns: int, num_prompts: int) -> None:
    stream = PromptStream(num_prompts, seed=1)
    for turn in drain_turns(stream, served)[:returns]:
        stream.give_back(*turn)
    saved = msgspec.json.decode(msgspec.json.encode(stream.state()), type=StreamState)
    restored = PromptStream.from_state(saved, num_prompts)
    assert drain_turns(restored, 15) == drain_turns(stream, 15)


def test_stream_over_other_data_is_not_restored() -> None:
    with pytest.raises(SettingError, match=r"made with 5 prompts, and task\.train_data now has 6"):
        PromptStream.from_state(PromptStream(5, seed=0).state(), 6)
