"""The look-up game of `examples/lookup`, played by an agent that knows only OpenAI's client."""

from typing import Any

from openai import AsyncOpenAI

MAX_TURNS = 4
_client = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")
"""Shared by all episodes: a client is costly to make."""


async def play(chat: Any, row: dict[str, Any]) -> float:
    """Let the agent play one episode; return its reward."""
    answer = await find(_client.with_options(base_url=chat.url), row["prompt"], row["table"])
    return float(answer == row["answer"])


async def find(client: AsyncOpenAI, question: str, table: dict[str, str]) -> str | None:
    """Return the model's answer to a question, or None when it gives none; it may look into the table before."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
        text = completion.choices[0].message.content or ""
        if text.startswith("!"):
            return text[1:]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": table.get(text[1:], ".")}]
    return None
