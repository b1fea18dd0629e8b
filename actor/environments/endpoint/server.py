"""The HTTP server of an environment worker, which gives each episode a base URL of its own for agents.

    http://127.0.0.1:PORT/e/SECRET/v1/chat/completions -> dialect -> session of the episode -> answer, or a stream of events

It listens on loopback only, from the first use of `chat.url` on. The secret of an episode is in its URL alone, so that agents
of one episode cannot play another.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.actor.environments.endpoint.anthropic_messages import ANTHROPIC_MESSAGES
from offbeat.actor.environments.endpoint.calls import Call, Dialect, check
from offbeat.actor.environments.endpoint.chat_completions import CHAT_COMPLETIONS
from offbeat.actor.environments.endpoint.responses import RESPONSES
from offbeat.actor.environments.endpoint.session import AgentSession, digest, over
from offbeat.common.errors import SettingError
from offbeat.common.settings.config import EnvironmentSection
from offbeat.common.user_code.requests import CallRefused

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

DIALECTS = (CHAT_COMPLETIONS, RESPONSES, ANTHROPIC_MESSAGES)
MAX_BODY_BYTES = 32 << 20
BODY_TIMEOUT_S = 60.0
"""Longest time in which a client sends its request."""
MAX_CONNECTIONS = 4096
HUNG_UP = 499
MODEL = "policy"
"""The name of the model in the list of models; requests may name any."""


class Endpoint:
    """The server and the episodes it is open for."""

    def __init__(self, temperature: float, settings: EnvironmentSection) -> None:
        """Make an endpoint that is not open yet; `temperature` is the run's."""
        self._temperature = temperature
        self._settings = settings
        self._sessions: dict[str, AgentSession] = {}
        self._address = ""
        self._serving: asyncio.Task[None] | None = None

    def open(self, session: AgentSession) -> str:
        """Return the base URL of a new episode. Raise `SettingError` when the server's packages are missing."""
        if self._serving is None:
            self._start()
        secret = secrets.token_urlsafe(24)
        self._sessions[secret] = session
        return f"{self._address}/e/{secret}/v1"

    def close(self, session: AgentSession) -> None:
        """Refuse the calls of an episode from now on, those that wait included."""
        session.end()
        self._sessions = {secret: one for secret, one in self._sessions.items() if one is not session}

    def _start(self) -> None:
        try:
            import uvicorn
            from starlette.applications import Starlette
            from starlette.routing import Route
        except ImportError as error:
            cure = "Install offbeat[agents], or play with chat.sample()."
            raise SettingError("task.environment", "chat.url", f"it needs a web server ({error})", cure) from error
        routes = [Route("/e/{secret}/v1/models", self._models, methods=["GET"])]
        for dialect in DIALECTS:
            for path in dialect.paths:
                routes.append(Route(f"/e/{{secret}}/v1/{path}", self._handler(dialect), methods=["POST"]))

        class Server(uvicorn.Server):
            # The worker's signals are its own.
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        # What the user's function starts must not keep the port open.
        listener.set_inheritable(False)
        listener.listen()
        self._address = "http://127.0.0.1:{1}".format(*listener.getsockname())
        application = Starlette(routes=routes, exception_handlers=dict.fromkeys((404, 405), _no_such_path))
        config = uvicorn.Config(
            application, http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
            limit_concurrency=MAX_CONNECTIONS, proxy_headers=False, server_header=False,
        )  # fmt: skip
        self._serving = asyncio.get_running_loop().create_task(Server(config).serve([listener]))

    async def _models(self, request: "Request") -> "Response":
        if request.path_params["secret"] not in self._sessions:
            return _problem(over(), CHAT_COMPLETIONS)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "offbeat"}
        return _json({"object": "list", "data": [model], "first_id": MODEL, "last_id": MODEL, "has_more": False})

    def _handler(self, dialect: Dialect) -> Any:
        from starlette.requests import ClientDisconnect

        async def handle(request: "Request") -> "Response":
            try:
                return await self._handle(request, dialect)
            except CallRefused as refused:
                return _problem(refused, dialect)
            except RecursionError:
                return _problem(CallRefused("the request is nested too deeply"), dialect)
            except ClientDisconnect:
                return _json({}, HUNG_UP)

        return handle

    async def _handle(self, request: "Request", dialect: Dialect) -> "Response":
        session = self._sessions.get(request.path_params["secret"])
        if session is None:
            raise over()
        try:
            body = await asyncio.wait_for(_read(request), BODY_TIMEOUT_S)
        except TimeoutError as error:
            raise CallRefused(f"the request has not arrived within {BODY_TIMEOUT_S:g} s", status=408) from error
        ignored = check(body, dialect, temperature=self._temperature, ignores=self._settings.sampling == "override")
        call = dialect.read(body)
        session.num_overrides += bool(ignored)
        if call.tools and not self._settings.tool_parser:
            cure = "Set environment.tool_parser to the form in which the model writes them."
            raise CallRefused(f"tools are refused: nothing here would read the calls of them. {cure}", field="tools")
        # Clients of OpenAI and Anthropic count their tries.
        uncounted = "0" if self._settings.identical_requests == "sample_again" else None
        is_first_try = request.headers.get("x-stainless-retry-count", uncounted) == "0"
        # As verifiers and others name the agent of an episode with several.
        agent = request.headers.get("x-session-id", "")
        answering = asyncio.ensure_future(
            session.answer(call, digest([dialect.paths, body, agent]), is_first_try=is_first_try, agent=agent)
        )
        hung_up = asyncio.ensure_future(request.receive())
        await asyncio.wait((answering, hung_up), return_when=asyncio.FIRST_COMPLETED)
        hung_up.cancel()
        if not answering.done():
            answering.cancel()
            return _json({}, HUNG_UP)
        return _respond(dialect, call, await answering)


def _respond(dialect: Dialect, call: Call, answer: Any) -> "Response":
    from starlette.responses import Response

    if not call.is_streamed:
        return _json(dialect.write(call, answer))
    # The turn is complete; its events only have the form of a stream.
    return Response(b"".join(dialect.stream(call, answer)), media_type="text/event-stream")


async def _read(request: "Request") -> dict[str, Any]:
    """Return the JSON object of a request's body."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise CallRefused(f"the request has more than {MAX_BODY_BYTES} bytes", status=413)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CallRefused(f"the request is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CallRefused("the request is no JSON object")
    return value


def _json(value: dict[str, Any], status: int = 200) -> "Response":
    from starlette.responses import Response

    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _no_such_path(request: "Request", error: Exception) -> "Response":
    """Answer as the paths that exist do: clients read errors as JSON."""
    paths = ", ".join(f"POST /v1/{path}" for dialect in DIALECTS for path in dialect.paths)
    path = request.url.path.partition("/v1")[2]
    problem = f"there is no {request.method} /v1{path} here; there are {paths} and GET /v1/models"
    return _problem(CallRefused(problem, status=404, code="unknown_url"), CHAT_COMPLETIONS)


def _problem(refused: CallRefused, dialect: Dialect) -> "Response":
    return _json(dialect.write_problem(refused), refused.status)
