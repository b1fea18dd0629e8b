"""Prompts are rendered by the tokenizer's chat template, token for token; what it cannot render is refused with the row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.actor.environments.chat import ChatFormat
from offbeat.actor.environments.endpoint.responses import RESPONSES
from offbeat.common.errors import SettingError
from offbeat.common.settings.config import DataSection
from offbeat.common.user_code.requests import for_template
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


def test_end_of_a_turn_that_the_tokenizer_adds_is_no_part_of_a_prompt(tiny_bpe_model: Path) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_bpe_model)
    start, end = (tokenizer.bos_token, tokenizer.bos_token_id), (tokenizer.eos_token, tokenizer.eos_token_id)
    plain = tokenizer.encode("2+2=")
    # One that the user wrote is.
    _, token_ids = render(DataRow("row 0", {"prompt": f"2+2={end[0]}"}, "{}"), DataSection(), tokenizer)
    assert token_ids.tolist() == [*plain, end[1]]
    # As `add_eos_token` makes it, which many fine-tuned models were saved with.
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{start[0]} $A {end[0]}", special_tokens=[start, end])
    assert tokenizer.encode("2+2=") == [start[1], *plain, end[1]]
    _, token_ids = render(DataRow("row 0", {"prompt": "2+2="}, "{}"), DataSection(), tokenizer)
    assert token_ids.tolist() == [start[1], *plain]
    opening = ChatFormat(tokenizer, {}, has_chat_template=False).opening("2+2=")
    assert opening == [start[1], *plain]


REQUEST: dict[str, Any] = {
    "instructions": "Be short.",
    "input": [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "input_text", "text": "6*"}, {"type": "input_text", "text": "7?"}]},
        {"type": "reasoning", "id": "r1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "42", "annotations": []}]},
        {"role": "user", "content": "And 6*8, 6*9?"},
        {"type": "function_call", "call_id": "c1", "name": "times", "arguments": '{"a": 6,  "b": 8}', "id": "f1"},
        {"type": "function_call", "call_id": "c2", "name": "times", "arguments": "6, 9"},
        {"type": "function_call_output", "call_id": "c1", "output": "48"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no JSON"}]},
    ],
    "tools": [
        {"type": "function", "name": "times", "description": "Multiply.", "parameters": {"type": "object"}, "strict": True},
        {"type": "function", "name": "now", "parameters": None},
    ],
    "temperature": 1.0,
}  # fmt: skip
SEEN = "{{ messages | tojson }}{{ tools | tojson }}{% if add_generation_prompt %}!{% endif %}"


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
    # As a row of a Parquet file has it where another row has the argument.
    assert thinking.decode(render(row("hi", arguments={"think": None}), data, thinking)[1]) == "<user>hi<assistant>!"


def test_null_in_a_message_counts_as_absent(thinking: Any) -> None:
    assert thinking.decode(render(row([{"role": "user", "content": "a", "name": None}]), CHAT, thinking)[1]).startswith(
        "<user>a<assistant>"
    )


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_message_of_the_assistant_that_only_calls_tools_needs_no_content(thinking: Any, content: dict[str, None]) -> None:
    thinking.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"
    call = {"role": "assistant", **content, "tool_calls": [{"id": "c1"}]}
    result = {"role": "tool", "content": "48", "tool_calls": None}
    _, token_ids = render(DataRow("row 0", {"prompt": [CONVERSATION[0], call, result]}, "{}"), CHAT, thinking)
    assert thinking.decode(token_ids) == "<user>What is 2 + 2?<assistant>[{'id': 'c1'}]<tool>48"


def test_request_of_responses_is_rendered_as_the_endpoint_of_an_episode_reads_it(thinking: Any) -> None:
    thinking.chat_template = SEEN
    text, token_ids = render(row(REQUEST), CHAT, thinking)
    call = RESPONSES.read(REQUEST)
    own = thinking.apply_chat_template(
        [for_template(message) for message in call.messages],
        tools=list(call.tools),
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert token_ids.tolist() == own
    assert text == "no JSON"
    roles = ["system", "system", "user", "assistant", "user", "assistant", "tool", "tool"]
    assert [message["role"] for message in call.messages] == roles


def test_request_with_a_text_as_input_is_one_message_and_tools_of_the_settings_replace_its_own(thinking: Any) -> None:
    assert thinking.decode(render(row({"input": "hi"}), CHAT, thinking)[1]) == "<user>hi<assistant>"
    # As rows of a table have it, where some other item is a call.
    of_table = {"type": None, "role": "user", "content": "hi", "call_id": None, "name": None, "arguments": None}
    assert thinking.decode(render(row({"input": [of_table]}), CHAT, thinking)[1]) == "<user>hi<assistant>"
    called: list[dict[str, Any]] = [item for item in REQUEST["input"] if item.get("call_id") == "c1"]
    assert thinking.decode(render(row({"input": called}), CHAT, thinking)[1]) == "<assistant><tool>48<assistant>"
    thinking.chat_template = SEEN
    data = DataSection(chat_template=True, template_arguments={"tools": []})
    assert thinking.decode(render(row({**REQUEST, "input": "hi"}), data, thinking)[1]).endswith("[]!")


@pytest.mark.parametrize(
    ("prompt", "data", "problem"),
    [
        ({"input": "hi"}, DataSection(), r"data\.chat_template = false: train\.jsonl:7 is a conversation"),
        ({"input": []}, CHAT, r"in train\.jsonl:7 input is empty"),
        ({"input": None}, CHAT, "input is not a list of objects"),
        ({"input": [{"type": "item_reference", "id": "7"}]}, CHAT, r"input\[0\] has the type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, CHAT, r"input\[0\]\.content\[0\] has the type"),
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
