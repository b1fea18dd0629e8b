"""The look-up game as an environment: the model asks, reads the answer, and asks again or answers."""

from typing import Any

MAX_TURNS = 4


async def play(chat: Any, row: dict[str, Any]) -> float:
    """Play one episode; return its reward."""
    for turn in range(1, MAX_TURNS + 1):
        chat.metric("turns", turn)
        reply = await chat.sample(max_new_tokens=2)
        if reply.text.startswith("!"):
            return float(reply.text[1:] == row["answer"])
        chat.add("tool", row["table"].get(reply.text[1:], "."))
    return 0.0
