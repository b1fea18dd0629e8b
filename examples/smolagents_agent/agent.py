"""The look-up game of `examples/lookup`, played by a smolagents `CodeAgent`: the model writes Python that calls a tool."""

import asyncio
from typing import Any

import openai
from smolagents import CodeAgent, LogLevel, OpenAIModel, PromptTemplates, Tool

PROMPTS: PromptTemplates = {
    "system_prompt": "",
    "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "", "post_messages": ""},
}
"""Empty: the library's own are pages long, and this model was shown what to do. Leave them out for a model that reads."""
_http = openai.DefaultHttpxClient()
"""Shared by all episodes: a client is costly to make."""


class Look(Tool):
    """Looks into the table of one game."""

    name = "look"
    description = "Looks into the table."
    inputs = {"key": {"type": "string", "description": "A letter."}}  # noqa: RUF012, as the library wants it
    output_type = "string"

    def __init__(self, table: dict[str, str]) -> None:
        super().__init__()
        self._table = table

    def forward(self, key: str) -> str:
        return self._table.get(key, ".")


async def play(chat: Any, row: dict[str, Any]) -> float:
    """Let the agent play one episode, in a thread because it is not async; return its reward."""
    answer = await asyncio.to_thread(find, chat.url, row["prompt"], row["table"])
    return float(answer == row["answer"])


def find(url: str, question: str, table: dict[str, str]) -> object:
    """Return the agent's answer to a question."""
    model = OpenAIModel("policy", api_base=url, api_key="none", client_kwargs={"http_client": _http})
    agent = CodeAgent([Look(table)], model, prompt_templates=PROMPTS, max_steps=2, verbosity_level=LogLevel.OFF)
    return agent.run(question)
