"""Environments of `verifiers` 0.4 (`verifiers.v1`), unmodified.

    task.environment = "verifiers:reverse-text"               an installed package
    task.environment = "verifiers:tasks/reverse_text"         a folder that has it
    environment.arguments = {taskset = {...}, agent = {...}}  the `[env]` table of its own configurations

    tasks of the taskset -> rows -> a task again -> `Env.run_episode`, whose agents ask the episode's endpoint -> rewards and
    metrics by their names

Agents run on this machine, not in a hosted sandbox, unless `arguments` say otherwise. Where the harness is the plain chat loop
(`null`), or none is named, its own program runs in this process: verifiers would start it with `uv` for every episode.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import functools
import json
import ssl
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.clients import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]
from verifiers.v1.clients import eval as eval_clients  # pyright: ignore[reportMissingImports]
from verifiers.v1.clients.base import DEFAULT_LIMITS  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.env import EnvConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.env import Env  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.null import NullHarness  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE  # pyright: ignore[reportMissingImports]
from verifiers.v1.runtimes import ProgramResult  # pyright: ignore[reportMissingImports]
from verifiers.v1.types import SamplingConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.generic import concrete_type  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
    default_harness_id,
    environment_class,
    load_environment,
)

# The loader of harnesses looks here.
__all__ = ["ChatHarness"]

PLAIN_LOOPS = (None, "null")
"""Harnesses whose program runs in this process."""
MAY_PASS = ("InterceptionError", "SandboxError", "TunnelError")
"""Errors of verifiers that say nothing about task or model."""
_arguments: contextvars.ContextVar[argparse.Namespace] = contextvars.ContextVar("arguments")


_certificates = functools.cache(ssl.create_default_context)


def build_client(config: Any) -> httpx.AsyncClient:
    """Return a client of an endpoint, as verifiers builds it. It would read the machine's certificates for each episode."""
    limits = httpx.Timeout(**config.timeout.model_dump())
    return httpx.AsyncClient(timeout=limits, limits=DEFAULT_LIMITS, verify=_certificates())


eval_clients.build_async_httpx = build_client


class ChatHarness(NullHarness):
    """The chat loop of `null`, tools over MCP included, without a process of its own."""

    _program: types.ModuleType | None = None

    async def setup(self, runtime: Any) -> None:
        """Prepare nothing: the program's packages are installed here."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:  # fmt: skip
        """Run the program to its end."""
        system_prompt, prompt = self.resolve_prompt(data)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        with tempfile.TemporaryDirectory(prefix="messages-") as folder:
            messages = Path(folder) / "messages.json"
            if prompt is not None and not isinstance(prompt, str):
                messages.write_text(json.dumps([message_to_wire(message) for message in prompt]))
            _arguments.set(
                argparse.Namespace(
                    base_url=endpoint, api_key=secret, model=ctx.model, system_prompt=system_prompt or "",
                    prompt=prompt if isinstance(prompt, str) else "",
                    initial_messages_file=str(messages) if messages.exists() else "",
                    mcp_config=json.dumps({"mcpServers": servers}) if servers else "",
                    tool_interception_url=tool_interception_url or "",
                    bash=False, compaction=False, summarize_at_tokens=None, edit=False, search=False, serper_key="",
                )
            )  # fmt: skip
            try:
                await self._loaded_program().main()
            except SystemExit as error:
                return ProgramResult(exit_code=int(error.code or 0), stdout="", stderr="the model cannot be reached")
            except Exception:  # noqa: BLE001, as that of a process of its own
                return ProgramResult(exit_code=1, stdout="", stderr=traceback.format_exc())
        return ProgramResult(exit_code=0, stdout="", stderr="")

    @classmethod
    def _loaded_program(cls) -> types.ModuleType:
        if ChatHarness._program is None:
            program = types.ModuleType("chat_program")
            exec(compile(CHAT_PROGRAM_SOURCE, "chat_program", "exec"), vars(program))
            client = httpx.AsyncClient(timeout=None)
            vars(program).update(parse_args=_arguments.get, DefaultAsyncHttpxClient=lambda **_: client)
            ChatHarness._program = program
        return ChatHarness._program


class VerifiersEnvironment:
    """One environment: its tasks, and its episodes."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._task_class = type(env.taskset).task_type()
        self._data_class = self._task_class.data_type()
        self._start = asyncio.Lock()
        self._serving: contextlib.AsyncExitStack | None = None

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield the taskset's tasks, which have no splits: `arguments` may name one for the taskset."""
        for task in self._env.taskset:
            data = task.data
            prompt = [data.prompt] if isinstance(data.prompt, str) else data.prompt or []
            messages = [
                message_to_wire(vf.UserMessage(content=one)) if isinstance(one, str) else message_to_wire(one) for one in prompt
            ]
            if data.system_prompt:
                messages.insert(0, {"role": "system", "content": data.system_prompt})
            # A scripted user may begin the conversation.
            messages = messages or [{"role": "user", "content": data.name or f"task {data.idx}"}]
            yield {"prompt": messages, "task": data.model_dump(mode="json")}

    async def play(self, chat: Any, row: dict[str, Any]) -> None:
        """Play a task, and give each agent its weighted rewards. Raise what ended it where it has none."""
        async with self._start:
            if self._serving is None:
                self._serving = contextlib.AsyncExitStack()
                await self._serving.enter_async_context(self._env.serving())
                # A shared server would keep a client for every episode's address: each episode has one of its own then.
                self._env._interception = None
        task = self._task_class(self._data_class.model_validate(row["task"]), self._env.config.taskset.task)
        # Attempts of one episode that ask the same are no retries; those are answered before they come here.
        client = EvalClientConfig(base_url=chat.url, api_key_var="NO_KEY_IS_NEEDED", headers={"x-stainless-retry-count": "0"})
        episode = await self._env.run_episode(task, ModelContext(model="policy", client=client, sampling=SamplingConfig()))
        _raise_failure(episode)
        chat.metric("turns", episode.num_turns)
        parts: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for trace in episode.traces:
            agent = trace.agent.name
            prefix = f"{agent}." if len(episode.by_agent) > 1 else ""
            for name, reward in trace.rewards.items():
                value = reward.value / len(episode.by_agent[agent])
                parts[prefix + name] = parts.get(prefix + name, 0.0) + value
                # The requests of its agent have its id.
                chat.reward(value, agent=trace.id)
            metrics.update((prefix + name, value) for name, value in trace.metrics.items() if value is not None)
        chat.show({**parts, **{name: value for name, value in metrics.items() if name not in parts}})


def load(name: str, arguments: dict[str, Any]) -> VerifiersEnvironment:
    """Return the environment with this id, or in this folder."""
    folder = Path(name)
    if "/" in name and folder.is_dir():
        # The package itself, or a project that holds it.
        sys.path.insert(0, str((folder.parent if (folder / "__init__.py").exists() else folder).resolve()))
        name = folder.name
    env_class = environment_class(name, arguments.get("id", ""))
    config_class = concrete_type(env_class, EnvConfig, origin=Env) or EnvConfig
    settings = {**arguments, "taskset": {"id": name, **arguments.get("taskset", {})}}
    has_own_harness = default_harness_id(name) != "bash"
    for role, field in config_class.model_fields.items():
        if isinstance(field.default, AgentConfig):
            given = dict(settings.get(role, {}))
            pinned = field.default.harness.id if field.default.harness else (name if has_own_harness else None)
            if (given.get("harness") or {}).get("id", pinned) in PLAIN_LOOPS:
                given["harness"] = {**(given.get("harness") or {}), "id": __name__}
            settings[role] = {"runtime": {"type": "subprocess"}, **given}
    return VerifiersEnvironment(load_environment(config_class.model_validate(settings)))


def _raise_failure(episode: Any) -> None:
    """Raise an episode's failure: `TimeoutError` and `ConnectionError` for those that may pass, else `RuntimeError`."""
    errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
        stops = [trace.stop_condition for trace in episode.traces if trace.is_timeout]
        raise TimeoutError(f"a time limit of the environment's own: {', '.join(map(str, stops)) or 'episode'}")
    if episode.ok:
        return
    if not errors:
        raise RuntimeError("the episode failed without an error")
    last = errors[-1]
    if last.type in MAY_PASS or (last.type == "ProviderError" and (last.status_code or 0) >= 500):
        raise ConnectionError(f"{last.type}: {last.message}")
    raise RuntimeError(f"{last.type}: {last.message}\n{last.traceback or ''}")
