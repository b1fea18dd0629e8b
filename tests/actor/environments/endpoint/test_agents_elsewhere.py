"""Agents of frameworks that have a Python of their own, and one in another language, play a game with a tool at the endpoint.

Every program asks a question, calls the tool that the model calls, and prints the model's answer.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.actor.environments.endpoint.endpoint_harness import Game, playing

PYTHON = os.environ.get("OFFBEAT_TEST_AGENTS", "")
"""A Python that has the frameworks; `.ci/extras` makes one."""
NODE_MODULES = os.environ.get("OFFBEAT_TEST_NODE_MODULES", "")
"""A folder `node_modules` that has `openai`."""

pytestmark = [pytest.mark.slow, pytest.mark.extras]

PYDANTIC_AI = """
import sys
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=sys.argv[1], api_key="none")))

@agent.tool_plain
def look(key: str) -> str:
    "Look up a key."
    return {"a": "7"}[key]

print(agent.run_sync("a?").output)
"""

OPENAI_AGENTS = """
import sys
from agents import Agent, AsyncOpenAI, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from agents import function_tool, set_tracing_disabled

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=sys.argv[1], api_key="none")

@function_tool
def look(key: str) -> str:
    "Look up a key."
    return {"a": "7"}[key]

model = MODEL(model="policy", openai_client=client)
print(Runner.run_sync(Agent(name="player", model=model, tools=[look]), "a?").final_output)
"""

LITELLM = """
import json, sys
import litellm

def ask(messages):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {
        "type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}}}]
    answer = litellm.completion("openai/policy", messages, api_base=sys.argv[1], api_key="none", tools=tools)
    return answer.choices[0].message

messages = [{"role": "user", "content": "a?"}]
message = ask(messages)
(call,) = message.tool_calls
found = {"a": "7"}[json.loads(call.function.arguments)["key"]]
messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": found}]
print(ask(messages).content)
"""

AUTOGEN = """
import asyncio, sys
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

async def look(key: str) -> str:
    "Look up a key."
    return {"a": "7"}[key]

async def main():
    info = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown", "structured_output": False}
    client = OpenAIChatCompletionClient(model="policy", base_url=sys.argv[1], api_key="none", model_info=info)
    agent = AssistantAgent("player", client, tools=[look], max_tool_iterations=2, system_message="Play.")
    print((await agent.run(task="a?")).messages[-1].content)

asyncio.run(main())
"""

DSPY = """
import sys
import dspy

dspy.configure(lm=dspy.LM("openai/policy", api_base=sys.argv[1], api_key="none", cache=False))

def look(key: str) -> str:
    "Look up a key."
    return {"a": "7"}[key]

print(dspy.ReAct("question -> answer", tools=[look])(question="a?").answer)
"""
DSPY_TURNS = (
    '[[ ## next_thought ## ]]\nLook.\n\n[[ ## next_tool_name ## ]]\nlook\n\n[[ ## next_tool_args ## ]]\n{"key": "a"}',
    "[[ ## next_thought ## ]]\nDone.\n\n[[ ## next_tool_name ## ]]\nfinish\n\n[[ ## next_tool_args ## ]]\n{}",
    "[[ ## reasoning ## ]]\nSeen.\n\n[[ ## answer ## ]]\nit is 7",
)

NODE = """
const OpenAI = require("openai");
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none" });
const tools = [{ type: "function", function: { name: "look", parameters: {
  type: "object", properties: { key: { type: "string" } }, required: ["key"] } } }];
(async () => {
  const messages = [{ role: "user", content: "a?" }];
  const first = await client.chat.completions.create({ model: "policy", messages, tools });
  const message = first.choices[0].message;
  const call = message.tool_calls[0];
  messages.push(message, { role: "tool", tool_call_id: call.id, content: { a: "7" }[JSON.parse(call.function.arguments).key] });
  const stream = await client.chat.completions.create({ model: "policy", messages, tools, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  console.log(text);
})();
"""

PROGRAMS = {
    "pydantic-ai": PYDANTIC_AI,
    "openai-agents": OPENAI_AGENTS.replace("MODEL(", "OpenAIChatCompletionsModel("),
    "openai-agents-responses": OPENAI_AGENTS.replace("MODEL(", "OpenAIResponsesModel("),
    "litellm": LITELLM,
    "autogen": AUTOGEN,
}


async def play(game: Game, *command: str, turns: Sequence[str] = ('<call>look{"key": "a"}</call>', "it is 7")) -> str:
    """Return what the program prints for a call of the tool and an answer."""
    game.write(*turns)
    variables = {**os.environ, "NO_PROXY": "127.0.0.1", "NODE_PATH": NODE_MODULES}
    run = await asyncio.to_thread(
        subprocess.run, [*command, game.url], env=variables, capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.strip().splitlines()[-1]


@pytest.mark.skipif(not PYTHON, reason="OFFBEAT_TEST_AGENTS names no Python with the frameworks")
@pytest.mark.parametrize("name", PROGRAMS)
def test_agent_calls_the_tool_and_its_game_is_one_sequence(name: str, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(PROGRAMS[name])

    async def claim() -> None:
        async with playing() as game:
            assert await play(game, PYTHON, str(program)) == "it is 7"
            assert game.sampled == [['<call>look{"key": "a"}</call>', "it is 7"]]
            assert "<tool>7" in game.begun[-1].text

    asyncio.run(claim())


@pytest.mark.skipif(not PYTHON, reason="OFFBEAT_TEST_AGENTS names no Python with the frameworks")
def test_dspy_writes_its_calls_as_text_and_begins_a_sequence_for_each_turn(tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(DSPY)

    async def claim() -> None:
        # Its instructions are long.
        async with playing(max_length=20_000) as game:
            assert await play(game, PYTHON, str(program), turns=DSPY_TURNS) == "it is 7"
            assert game.sampled == [[turn] for turn in DSPY_TURNS]
            assert "7" in game.begun[1].text.partition("observation")[2], "what the tool has found"

    asyncio.run(claim())


@pytest.mark.skipif(not (NODE_MODULES and shutil.which("node")), reason="OFFBEAT_TEST_NODE_MODULES has no openai for node")
def test_program_in_javascript_plays_with_the_official_package(tmp_path: Path) -> None:
    program = tmp_path / "agent.cjs"
    program.write_text(NODE)

    async def claim() -> None:
        async with playing() as game:
            assert await play(game, "node", str(program)) == "it is 7"
            assert game.sampled == [['<call>look{"key": "a"}</call>', "it is 7"]]

    asyncio.run(claim())
