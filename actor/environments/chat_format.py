"""The tokens that stand between two turns of the model: what an environment adds, as the tokenizer's template writes it.

History is never rendered again, because text that is tokenized anew need not give the tokens that were sampled. The next
prompt is the tokens so far, then a bridge: the difference between two renderings of a made-up conversation.

    render(user, assistant)                     ... <end> \\n
    render(user, assistant, added messages)     ... <end> \\n <start> tool 7 <end> \\n <start> assistant \\n
                                                     ^ the bridge begins behind the end of the assistant's turn
"""

from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.common.errors import SettingError

SETTING = "data.chat_template"
_CURE = (
    "Use a template that only appends, or set data.chat_template=false and write the marks of turns yourself in add(). "
    "Templates that drop the reasoning of earlier turns often keep it under an argument (data.template_arguments)."
)
_DUMMY = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "two"})
_PROBE = {"role": "user", "content": "three"}


Message = Mapping[str, Any]
"""A message as chat templates know it: `role`, `content`, and what else the template knows (`tool_call_id`, `name`,
`tool_calls`, `reasoning_content`)."""


def checked_message(message: object) -> Message:
    """Return a message with its content as text; raise `TypeError` where it is none."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"a message has a role, and {message!r} has none")
    # OpenAI has null where a message only calls tools.
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise TypeError(f"the content of a {message['role']!r} message is a text, not {content!r}")
    return {**message, "content": content}


class ChatFormat:
    """Turns added messages into the tokens that the model reads before its next turn."""

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any], *, has_chat_template: bool) -> None:
        """Raise `SettingError` when the tokenizer's template does not let turns be appended."""
        self._tokenizer = tokenizer
        self._arguments = dict(template_arguments)
        self._has_chat_template = has_chat_template
        self._end: list[int] = []
        """The token that ends a turn of the assistant; empty without a template."""
        self._prefix: list[int] = []
        """The rendering of the made-up conversation, up to and with that token."""
        if has_chat_template:
            self._prepare()

    def context(self, messages: Sequence[Message], *, last_token: int | None) -> list[int]:
        """Return the tokens of these messages; `last_token` is the last sampled one, None before the first turn.

        Raise `ValueError` for messages that cannot stand there.
        """
        if not self._has_chat_template:
            text = "".join(message["content"] for message in messages)
            return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []
        if last_token is None:
            if messages:
                raise ValueError(
                    "add() before the first sample(): the prompt already ends where the model speaks; put it into the row, or "
                    "among the messages of restart()"
                )
            return []
        rendered = self._render([*_DUMMY, *messages], opens_turn=True)
        if rendered[: len(self._prefix)] != self._prefix:
            raise ValueError(f"the chat template changes earlier turns when a {messages[-1]['role']!r} message follows")
        bridge = rendered[len(self._prefix) :]
        # A turn that was cut has no end yet: the model reads it as context.
        return bridge if [last_token] == self._end else [*self._end, *bridge]

    def cut(self, text: str, max_tokens: int) -> str:
        """Return a text of at most `max_tokens` tokens, with a mark where its end was cut."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) <= max_tokens:
            return text
        # A character may have been cut in its middle.
        kept = self._tokenizer.decode(token_ids[:max_tokens]).rstrip("\ufffd")
        return f"{kept}\n[{len(token_ids) - max_tokens} more tokens]"

    def opening(self, messages: str | Sequence[Message], tools: Sequence[Message] | None = None) -> list[int]:
        """Return the tokens of a conversation up to where the model speaks; a text is one message of the user.

        `tools` (JSON schemas) take the place of the environment's. Without a template, return the tokens of the contents, as of
        a prompt. Raise `ValueError` for messages that cannot be written.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        messages = [checked_message(message) for message in messages]
        if not self._has_chat_template:
            opening = list(self._tokenizer.encode("".join(message["content"] for message in messages)))
        else:
            opening = self._render(messages, opens_turn=True, **({} if tools is None else {"tools": list(tools) or None}))
        if not opening:
            raise ValueError("a sequence begins with at least one token")
        return opening

    def _prepare(self) -> None:
        if self._tokenizer.chat_template is None:
            raise SettingError(SETTING, True, "the tokenizer has no chat template", "Set it to false.")
        closed = self._render(_DUMMY, opens_turn=False)
        ends = [index for index, token in enumerate(closed) if token == self._tokenizer.eos_token_id]
        if not ends:
            problem = f"the template does not end a turn with {self._tokenizer.eos_token!r}, at which sampling stops"
            raise SettingError(SETTING, True, problem, "Give the tokenizer the eos_token with which its template ends turns.")
        self._end = [closed[ends[-1]]]
        self._prefix = closed[: ends[-1] + 1]
        first = self._render([*_DUMMY, _PROBE], opens_turn=True)
        if first != self._render([*_DUMMY, _PROBE], opens_turn=True):
            raise SettingError(SETTING, True, "the template gives another text each time: a date, or a random id", _CURE)
        if first[: len(self._prefix)] != self._prefix:
            raise SettingError(SETTING, True, "the template changes earlier turns when a message follows", _CURE)

    def _render(self, messages: Sequence[Message], *, opens_turn: bool, **more: Any) -> list[int]:
        arguments = {**self._arguments, **more}
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=opens_turn, return_dict=False, **arguments
            )
        # Templates are programs, and raise what they like.
        except Exception as error:
            raise ValueError(f"the chat template cannot write these messages: {error}") from error
        return [int(token) for token in rendered]
