"""The model's turn, read by vLLM's parsers: its text, its reasoning, and the tools that it calls.

Each model family writes tool calls in a form of its own. vLLM knows some fifty; `environment.tool_parser` names one.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from offbeat.common.errors import SettingError
from offbeat.common.user_code.environment_function import ToolSchema
from offbeat.protocols.text import encodable

logger = logging.getLogger(__name__)


class ToolCall(NamedTuple):
    """A call that the model has written."""

    id: str
    """Nine letters and digits, which every template takes. No two calls of an episode have the same."""
    name: str
    arguments: str
    """JSON, as a rule an object. The model wrote it, so it need not fit the schema."""


class Parsed(NamedTuple):
    """A turn of the model in parts."""

    text: str
    """The sampled text without special tokens; with parsers also without reasoning and tool calls."""
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


class TurnParser:
    """Reads turns of a model; without parsers as text only."""

    def __init__(
        self, tokenizer: Any, tools: Sequence[ToolSchema] = (), *, tool_parser: str = "", reasoning_parser: str = ""
    ) -> None:
        """`tools` are the environment's. Raise `SettingError` for a parser that vLLM does not have, or that needs other tokens.

        With a parser this imports vLLM, unless the process is a fork of one that has: some 8 s of CPU time, half a gigabyte.
        """
        self._tokenizer = tokenizer
        self._tools = tools
        self._parser_class = _load(tokenizer, tool_parser, reasoning_parser) if tool_parser or reasoning_parser else None

    def parse(
        self, token_ids: Sequence[int], finish_reason: str, *, tools: Sequence[ToolSchema] | None = None, num_calls: int = 0
    ) -> Parsed:
        """Return the parts of a sampled turn. One that was cut (`length`) calls no tool: its call may be half of one.

        `tools`, instead of the environment's, tell some parsers the types of arguments. `num_calls` is the number of calls in
        the episode's turns before.
        """
        if self._parser_class is not None:
            try:
                return self._parse(token_ids, finish_reason, self._tools if tools is None else tools, num_calls)
            # A parser may raise anything at what a model writes, which is then text.
            except Exception as error:  # noqa: BLE001
                logger.debug("a turn is read as text: %s", error)
        return Parsed(str(self._tokenizer.decode(token_ids, skip_special_tokens=True)), "", ())

    def _parse(self, token_ids: Sequence[int], finish_reason: str, tools: Sequence[ToolSchema], num_calls: int) -> Parsed:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        fields: dict[str, Any] = {"messages": [], "tools": list(tools) or None}
        request = ChatCompletionRequest(**fields)
        # Without tools it would be "none", and calls be text.
        request.tool_choice = "auto"
        # Without the token that ended it; marks of calls and of reasoning are special tokens too in some families.
        text = self._tokenizer.decode(token_ids[:-1] if finish_reason == "stop" else token_ids, skip_special_tokens=False)
        assert self._parser_class is not None
        parser = self._parser_class(self._tokenizer, request.tools)
        reasoning, content, calls = parser.parse(text, request, finish_reason == "stop", token_ids)
        named = tuple(
            ToolCall(f"call{num_calls + index:05d}", encodable(call.name), encodable(call.arguments))
            for index, call in enumerate(calls or ())
        )
        return Parsed(content or "", reasoning or "", named)


def _load(tokenizer: Any, tool_parser: str, reasoning_parser: str) -> Any:
    """Return vLLM's class that reads both."""
    given = ("environment.tool_parser", tool_parser) if tool_parser else ("environment.reasoning_parser", reasoning_parser)
    try:
        from vllm.parser.parser_manager import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        cure = "Install offbeat[cpu] or offbeat[cuda], or remove the setting."
        raise SettingError(*given, f"it needs vLLM ({error})", cure) from error
    for setting, name, known in (
        ("environment.tool_parser", tool_parser, ToolParserManager.list_registered()),
        ("environment.reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name and name not in known:
            raise SettingError(setting, name, "vLLM has no such parser", f"Use one of {', '.join(known)}.")
    # They log a traceback for each call that is no JSON: an everyday sight in training.
    for package in ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning"):
        logging.getLogger(package).setLevel(logging.CRITICAL)
    try:
        return ParserManager.get_parser(
            tool_parser or None,
            reasoning_parser or None,
            enable_auto_tools=True,
            tokenizer=tokenizer,
            model_name=tokenizer.name_or_path,
        )
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        problem = f"the parser cannot be used with this tokenizer ({' '.join(str(error).split())})"
        raise SettingError(*given, problem, "Use the parser of the model's family.") from error
