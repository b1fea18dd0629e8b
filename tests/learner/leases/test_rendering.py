"""Prompts are rendered by the tokenizer's chat template, token for token; what it cannot render is refused with the row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import DataSection
from offbeat.learner.leases.data_rows import DataRow
from offbeat.learner.leases.rendering import render

CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 4 + 4?"},
]
CHAT = DataSection(chat_template=True)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.name is defined %}@{{ m.name }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if think is defined %}{{ think }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_bpe_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_bpe_model)


@pytest.fixture
def thinking(tiny_bpe_model: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_bpe_model)
    tokenizer.chat_template = THINKING
    return tokenizer


def row(prompt: object, **fields: object) -> DataRow:
    return DataRow("train.jsonl:7", {"prompt": prompt, **fields}, "{}")


def test_conversation_has_exactly_the_tokens_of_the_tokenizers_own_template(tokenizer: Any) -> None:
    text, token_ids = render(row(CONVERSATION), CHAT, tokenizer)
    own = tokenizer.apply_chat_template(CONVERSATION, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert token_ids.dtype == np.int32
    assert token_ids.tolist() == own
    assert text == "And 4 + 4?"


def test_system_prompt_comes_first_unless_the_row_or_the_conversation_has_its_own(thinking: Any) -> None:
    data = DataSection(chat_template=True, system_prompt="task", system_prompt_field="system")

    def shown(prompt: object, system: object) -> str:
        return thinking.decode(render(row(prompt, system=system), data, thinking)[1])

    assert shown("hi", None) == "<system>task<user>hi<assistant>"
    assert shown("hi", "row") == "<system>row<user>hi<assistant>"
    assert shown([{"role": "system", "content": "own"}, *CONVERSATION[:1]], "row").startswith("<system>own<user>")


def test_templates_arguments_of_a_row_replace_those_of_the_task(thinking: Any) -> None:
    data = DataSection(chat_template=True, template_arguments={"think": "!"}, template_arguments_field="arguments")
    assert thinking.decode(render(row("hi", arguments=None), data, thinking)[1]) == "<user>hi<assistant>!"
    assert thinking.decode(render(row("hi", arguments={"think": "?"}), data, thinking)[1]) == "<user>hi<assistant>?"


def test_null_in_a_message_counts_as_absent(thinking: Any) -> None:
    assert thinking.decode(render(row([{"role": "user", "content": "a", "name": None}]), CHAT, thinking)[1]).startswith(
        "<user>a<assistant>"
    )


@pytest.mark.parametrize(
    ("prompt", "data", "problem"),
    [
        (CONVERSATION, DataSection(), r"data\.chat_template = false: train\.jsonl:7 is a conversation"),
        (CONVERSATION[:2], CHAT, "ends with a message of the assistant"),
        ([], CHAT, "a list with other things than messages"),
        (["hi"], CHAT, "a list with other things than messages"),
        ([{"role": "user"}], CHAT, "a list with other things than messages"),
        ({"role": "user", "content": "hi"}, CHAT, "it is of type dict"),
        ("hi", DataSection(chat_template=True, system_prompt_field="system"), "train.jsonl:7 has no such field"),
    ],
)
def test_prompt_that_cannot_be_rendered_is_refused_with_its_row(
    prompt: object, data: DataSection, problem: str, tokenizer: Any
) -> None:
    with pytest.raises(SettingError, match=problem):
        render(row(prompt), data, tokenizer)


def test_refusal_of_the_template_is_told(thinking: Any) -> None:
    thinking.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(SettingError, match=r"refuses the prompt of train\.jsonl:7 \(roles must alternate\)"):
        render(row("hi"), CHAT, thinking)
