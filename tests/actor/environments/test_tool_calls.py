"""Turns are read by vLLM's parsers, as its server reads them; whatever a model writes, an episode goes on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from offbeat.actor.environments.chat import Chat, ChatEpisode, ChatFormat
from offbeat.actor.environments.messages import PlayEpisode, TurnSampled
from offbeat.actor.environments.tool_calls import Parsed, ToolCall, TurnParser
from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config

pytestmark = pytest.mark.slow

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "zwei ü"}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def tokenizer(tiny_bpe_model: Path) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_bpe_model)
    # Marks of calls and reasoning are special tokens in many families.
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>", "<tool_call>", "</tool_call>"]})
    return tokenizer


def turn(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


def test_calls_of_a_turn_are_read_and_named(tokenizer: Any) -> None:
    parser = TurnParser(tokenizer, tool_parser="hermes")
    parsed = parser.parse(turn(tokenizer, f"I add.{CALL}{CALL}"), "stop", tools=[ADD], num_calls=3)
    arguments = '{"a": 1, "b": "zwei ü"}'
    assert parsed == Parsed("I add.", "", (ToolCall("call00003", "add", arguments), ToolCall("call00004", "add", arguments)))


def test_half_a_character_stays_the_escape_that_the_model_wrote(tokenizer: Any) -> None:
    text = '<tool_call>\n{"name": "add\\udc80", "arguments": {"a": "\\ud83d"}}\n</tool_call>'
    (call,) = TurnParser(tokenizer, tool_parser="hermes").parse(turn(tokenizer, text), "stop").tool_calls
    assert call == ToolCall("call00000", "add\\udc80", '{"a": "\\ud83d"}')


def test_arguments_that_are_no_json_are_typed_by_the_schema(tokenizer: Any) -> None:
    parser = TurnParser(tokenizer, tool_parser="qwen3_xml")
    text = "<tool_call>\n<function=add>\n<parameter=a>\n17\n</parameter>\n</function>\n</tool_call>"
    (call,) = parser.parse(turn(tokenizer, text), "stop", tools=[ADD]).tool_calls
    assert call == ToolCall("call00000", "add", '{"a": 17}')


def test_turn_that_was_cut_calls_no_tool(tokenizer: Any) -> None:
    parser = TurnParser(tokenizer, tool_parser="hermes")
    assert parser.parse(tokenizer.encode(CALL), "length") == Parsed(CALL, "", ())
    assert len(parser.parse(turn(tokenizer, CALL), "stop").tool_calls) == 1


def test_reasoning_is_taken_apart_and_calls_no_tool(tokenizer: Any) -> None:
    parser = TurnParser(tokenizer, tool_parser="hermes", reasoning_parser="deepseek_r1")
    parsed = parser.parse(turn(tokenizer, f"<think>I may say {CALL}.</think>Done."), "stop")
    assert parsed.text == "Done."
    assert parsed.reasoning.startswith("I may say")
    assert parsed.tool_calls == ()


@pytest.mark.parametrize("text", ["<tool_call>{</tool_call>", "<tool_call>[]</tool_call>", '<tool_call>{"name": 3}'])
def test_what_is_no_call_is_text(tokenizer: Any, text: str) -> None:
    parsed = TurnParser(tokenizer, tool_parser="hermes").parse(turn(tokenizer, text), "stop")
    assert (parsed.text, parsed.tool_calls) == (text, ())


def test_without_a_parser_a_turn_is_text(tokenizer: Any) -> None:
    parsed = TurnParser(tokenizer).parse(turn(tokenizer, "2 + 2"), "stop")
    assert parsed == Parsed("2 + 2", "", ())


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
def test_unknown_parser_is_refused_with_a_list(tokenizer: Any, setting: str) -> None:
    with pytest.raises(SettingError, match=rf'environment\.{setting} = "gpt9".*no such parser.*Use one of .*qwen3'):
        TurnParser(tokenizer, (), **{setting: "gpt9"})


def test_parser_whose_marks_the_tokenizer_lacks_is_refused(tiny_bpe_model: Path) -> None:
    with pytest.raises(SettingError, match=r"tool_parser = .*cannot be used with this tokenizer.*could not locate"):
        TurnParser(AutoTokenizer.from_pretrained(tiny_bpe_model), tool_parser="jamba")


def test_functions_turns_have_calls_and_its_answers_are_messages(tokenizer: Any) -> None:
    """Ids count over the episode, so each call has its own."""
    asked: list[Any] = []
    play = PlayEpisode(
        episode="1/0/0", row="{}", prompt="", num_prompt_tokens=9, max_new_tokens=99, seed=0, is_evaluation=False
    )
    parser = TurnParser(tokenizer, tool_parser="hermes")
    episode = ChatEpisode(play, Config(), asked.append, lambda _: "")
    chat = Chat(episode, ChatFormat(tokenizer, {}, has_chat_template=True), parser)

    async def answered() -> list[str]:
        ids: list[str] = []
        for number in range(2):
            turn_of_model = asyncio.create_task(chat.sample())
            await asyncio.sleep(0)
            episode.take(TurnSampled(episode="1/0/0", turn=number, token_ids=turn(tokenizer, CALL), finish_reason="stop"))
            (call,) = (await turn_of_model).tool_calls
            chat.add({"role": "tool", "content": "7", "tool_call_id": call.id, "name": call.name})
            ids.append(call.id)
        return ids

    assert asyncio.run(answered()) == ["call00000", "call00001"]
    assert tokenizer.decode(asked[1].context) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    for message in ({"content": "7"}, {"role": "tool", "content": [7]}, 7):
        with pytest.raises(TypeError, match="message"):
            chat.add(message)  # type: ignore[arg-type]
