"""An episode for tests of the tools: of a chat that asks no model. Processes import this module in a moment."""

from typing import Any, cast

from offbeat.actor.environments.chat import Chat, ChatEpisode, NoRoom, Reply
from offbeat.actor.environments.messages import PlayEpisode
from offbeat.common.settings.config import Config


class Unasked(Chat):
    """A chat of which no model is asked."""

    def __init__(self) -> None:
        message = PlayEpisode(
            episode="1/0/0", row="{}", prompt="", num_prompt_tokens=1, max_new_tokens=1, seed=0, is_evaluation=False
        )
        self.episode = ChatEpisode(message, Config(), print, str)
        super().__init__(self.episode, cast(Any, None), cast(Any, None))

    async def sample(self, max_new_tokens: int | None = None) -> Reply:
        return Reply("reply", (), "stop")


async def game(chat: Any, row: dict[str, Any]) -> Any:
    for _ in range(row.get("turns", 1)):
        await chat.sample()
    chat.reward(0.25)
    if row["returns"] == "no room":
        raise NoRoom
    return row["returns"]
