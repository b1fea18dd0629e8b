"""The game of `examples/calculator`, played by a LangGraph agent that knows nothing of training."""

from typing import Any

import httpx
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

MAX_NODES = 6
"""Nodes that a game visits at most: three turns of the model, and the tools behind each."""
_http: dict[str, Any] = {"http_client": httpx.Client(), "http_async_client": httpx.AsyncClient(timeout=None)}
"""Shared by all episodes: each client reads the machine's certificates, which takes longer than an episode."""


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def think(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    """Ask the model for its next message."""
    return {"messages": [await config["configurable"]["model"].ainvoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([add, multiply]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
agent = graph.compile()


async def play(chat: Any, row: dict[str, Any]) -> float:
    """Let the agent play one episode; return its reward."""
    model = ChatOpenAI(model="policy", base_url=chat.url, api_key="none", **_http)
    config: RunnableConfig = {"recursion_limit": MAX_NODES, "configurable": {"model": model.bind_tools([add, multiply])}}
    try:
        end = await agent.ainvoke({"messages": [("user", row["prompt"])]}, config)
    except GraphRecursionError:
        # The model's mistake, not the program's.
        return 0.0
    return float(end["messages"][-1].content == row["answer"])
