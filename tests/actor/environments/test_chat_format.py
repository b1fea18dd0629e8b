"""Messages that an environment adds become the tokens that the template puts between turns; sampled tokens never change."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from offbeat.actor.environments.chat import ChatFormat
from offbeat.common.errors import SettingError
from offbeat.common.user_code.requests import Message

STRIPPING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ 'short' if m.role == 'assistant' and loop.index0 < ns.last else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
words = st.text("What is 2+?", min_size=1, max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tiny_bpe_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_bpe_model)


def named(messages: list[tuple[str, str]]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in messages]


def rendered(tokenizer: Any, messages: list[tuple[str, str]], *, opens_turn: bool) -> list[int]:
    return list(
        tokenizer.apply_chat_template(named(messages), tokenize=True, add_generation_prompt=opens_turn, return_dict=False)
    )


@given(st.lists(st.tuples(st.sampled_from(["user", "tool"]), words), min_size=1, max_size=3), st.integers(3, 299))
def test_history_and_bridge_are_what_the_template_writes_for_a_history_that_tokenizes_alike(
    tokenizer: Any, added: list[tuple[str, str]], token: int
) -> None:
    chat_format = ChatFormat(tokenizer, {}, has_chat_template=True)
    start = rendered(tokenizer, [("user", "What is 2 + 2?")], opens_turn=True)
    whole = rendered(tokenizer, [("user", "What is 2 + 2?"), ("assistant", "a"), *added], opens_turn=True)
    sampled = [*tokenizer.encode("a"), tokenizer.eos_token_id]
    assert [*start, *sampled, *chat_format.context(named(added), last_token=sampled[-1])] == whole
    # Whatever was sampled before: the bridge is the same, and a turn that was cut is closed by context.
    assert chat_format.context(named(added), last_token=token) == [
        *([] if token == tokenizer.eos_token_id else [tokenizer.eos_token_id]),
        *chat_format.context(named(added), last_token=tokenizer.eos_token_id),
    ]


def test_first_turn_needs_no_context_and_takes_none(tokenizer: Any) -> None:
    chat_format = ChatFormat(tokenizer, {}, has_chat_template=True)
    assert chat_format.context([], last_token=None) == []
    with pytest.raises(ValueError, match=r"before the first sample\(\)"):
        chat_format.context([{"role": "user", "content": "hello"}], last_token=None)


def test_without_a_template_added_text_stands_as_it_is(tokenizer: Any) -> None:
    chat_format = ChatFormat(tokenizer, {}, has_chat_template=False)
    added = named([("tool", "2 + 2"), ("user", " is?")])
    assert chat_format.context(added, last_token=None) == tokenizer.encode("2 + 2 is?", add_special_tokens=False)
    assert chat_format.context([], last_token=5) == []


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (STRIPPING, "changes earlier turns"),
        ("{{ messages | length }}" + "{{ range(9) | random }}{{ range(99999) | random }}<|im_end|>", "another text each time"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not end a turn"),
        (None, "no chat template"),
    ],
)
def test_template_that_turns_cannot_be_appended_to_is_refused(tiny_bpe_model: Path, template: str | None, why: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_bpe_model)
    tokenizer.chat_template = template
    with pytest.raises(SettingError, match=why):
        ChatFormat(tokenizer, {}, has_chat_template=True)


def test_message_that_the_template_refuses_is_the_functions_mistake(tiny_bpe_model: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_bpe_model)
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + (
        tokenizer.chat_template.removeprefix("{% for message in messages %}").replace("message", "m")
    )
    chat_format = ChatFormat(tokenizer, {}, has_chat_template=True)
    with pytest.raises(ValueError, match="no tools"):
        chat_format.context([{"role": "tool", "content": "7"}], last_token=tokenizer.eos_token_id)


@given(st.text("What is 2+?ü", max_size=30), st.integers(0, 20))
def test_long_text_is_cut_in_tokens_and_says_so(tokenizer: Any, text: str, max_tokens: int) -> None:
    cut = ChatFormat(tokenizer, {}, has_chat_template=False).cut(text, max_tokens)
    num_tokens = len(tokenizer.encode(text))
    if num_tokens <= max_tokens:
        assert cut == text
    else:
        kept, _, mark = cut.rpartition("\n")
        assert text.startswith(kept)
        assert len(tokenizer.encode(kept)) <= max_tokens
        assert mark == f"[{num_tokens - max_tokens} more tokens]"


def test_opening_is_the_whole_conversation_up_to_where_the_model_speaks(tokenizer: Any) -> None:
    said = [("system", "You add."), ("user", "2 + 2?"), ("assistant", "4"), ("user", "What is 3?")]
    chat_format = ChatFormat(tokenizer, {}, has_chat_template=True)
    assert chat_format.opening(named(said)) == rendered(tokenizer, said, opens_turn=True)
    assert chat_format.opening("What is 2?") == rendered(tokenizer, [("user", "What is 2?")], opens_turn=True)
    with pytest.raises(TypeError, match="a message has a role"):
        chat_format.opening([{"content": "What?"}])
    plain = ChatFormat(tokenizer, {}, has_chat_template=False)
    assert plain.opening("What is 2?") == tokenizer.encode("What is 2?")
    assert plain.opening(named(said)) == tokenizer.encode("You add.2 + 2?4What is 3?")
    with pytest.raises(ValueError, match="at least one token"):
        plain.opening("")


def test_opening_tells_the_template_of_tools(tiny_bpe_model: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_bpe_model)
    tokenizer.chat_template = "{% for tool in tools or () %}{{ tool.name }} {% endfor %}" + tokenizer.chat_template
    chat_format = ChatFormat(tokenizer, {}, has_chat_template=True)
    expected = [*tokenizer.encode("a b "), *chat_format.opening("What?")]
    assert tokenizer.decode(chat_format.opening("What?", [{"name": "a"}, {"name": "b"}])) == tokenizer.decode(expected)
