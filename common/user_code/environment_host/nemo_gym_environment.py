"""Resource servers of NeMo Gym: the model calls the tools of a row, and the server verifies the whole response.

    task.environment = "nemo_gym:workplace"                       the name is yours to choose
    environment.arguments = {url = "http://127.0.0.1:8000", max_turns = 20}
    data.prompt_field = "responses_create_params"

    row -> /seed_session -> turn of the model -> /TOOL for each call -> turn ... -> a turn without a call -> /verify -> reward

The model reads what a tool answers, errors included, as it does with NeMo Gym's own agent. A server that cannot be reached, or
that asks to come again later, ends the attempt.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from typing import Any
from urllib.parse import quote

REQUEST_S = 600.0
"""Longest wait for an answer of the server. `environment.turn_timeout_s`, which is shorter as a rule, ends the episode."""
MAX_ANSWER_BYTES = 16 << 20
UNAVAILABLE = (408, 425, 429, 502, 503, 504)
"""HTTP statuses that say nothing about a tool's arguments. 500 does: NeMo Gym's servers answer so when a tool has raised."""


class Session:
    """The requests of one episode, which share their cookies."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))

    def post(self, path: str, body: Any) -> str:
        """Return the answer; raise `HTTPError` with its text for an error."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=REQUEST_S) as answer:
                content = answer.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            error.msg = error.read(MAX_ANSWER_BYTES).decode(errors="replace") or error.msg
            raise
        if len(content) > MAX_ANSWER_BYTES:
            raise ValueError(f"/{path} answered with more than {MAX_ANSWER_BYTES >> 20} MiB")
        return content.decode()

    def call(self, name: str, arguments: str) -> str:
        """Return a tool's answer as the model reads it."""
        try:
            given = json.loads(arguments)
        # Also numbers and lists too long for Python.
        except (ValueError, RecursionError) as error:
            return json.dumps({"error": f"the arguments are no JSON: {error}"})
        try:
            return self.post(quote(name, safe=""), given)
        except urllib.error.HTTPError as error:
            if error.code in UNAVAILABLE:
                raise
            return error.msg


class NemoGymEnvironment:
    """The environment of one server."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Raise `ValueError` where no server answers, and for one that does not verify responses."""
        self._url = str(arguments["url"]).rstrip("/")
        self._max_turns = int(arguments.get("max_turns", 50))
        try:
            with urllib.request.urlopen(f"{self._url}/openapi.json", timeout=30) as answer:
                missing = {"/seed_session", "/verify"} - json.load(answer)["paths"].keys()
        except (OSError, ValueError, KeyError) as error:
            cure = "start it, or correct environment.arguments"
            raise ValueError(f"url = {self._url!r}: no resource server answers there ({error}): {cure}") from error
        if missing:
            raise ValueError(f"the server at {self._url} has no {' and no '.join(sorted(missing))}: it is for another agent")

    def play(self, chat: Any, row: dict[str, Any]) -> dict[str, Any]:
        """Play a row of the server's data; return the reward of its verification."""
        if "responses_create_params" not in row:
            raise ValueError("the row has no responses_create_params: name NeMo Gym's own JSONL as data")
        session = Session(self._url)
        session.post("seed_session", row)
        response = self._respond(chat, session, row["responses_create_params"])
        verdict = json.loads(session.post("verify", {**row, "response": response}))
        # A verifier whose judge has failed says so beside a reward of 0, which is none.
        if verdict.get("_ng_failure_class"):
            raise ConnectionError(f"{verdict['_ng_failure_class']}: {verdict.get('_ng_failure_judge_error')}")
        numbers = {**(verdict.get("reward_components") or {}), **verdict}
        # A server repeats the row.
        others = {*row, "reward"}
        chat.show({name: value for name, value in numbers.items() if name not in others and isinstance(value, (int, float))})
        return {"reward": verdict.get("reward")}

    def _respond(self, chat: Any, session: Session, request: dict[str, Any]) -> dict[str, Any]:
        """Return the model's turns, with the answers of the tools between them, as one response."""
        # Rows that were written from requests of a client hold every field, most of them null.
        fields = {name: value for name, value in request.items() if value is not None}
        given = request["input"]
        history = [{"role": "user", "content": given}] if isinstance(given, str) else given
        tools = {tool["name"] for tool in request.get("tools") or () if tool.get("type") == "function"}
        outputs: list[dict[str, Any]] = []
        response: dict[str, Any] = {}
        for turn in range(1, self._max_turns + 1):
            try:
                response = chat.respond(**{**fields, "input": [*history, *outputs], "stream": False})
            except urllib.error.HTTPError as error:
                # The next turn does not fit: the turns so far are verified.
                if outputs and "context_length_exceeded" in error.msg:
                    break
                raise
            chat.metric("turns", turn)
            outputs += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            if not calls:
                break
            for call in calls:
                # Any other name would be a path of the server: /verify.
                is_tool = call["name"] in tools
                answer = session.call(call["name"], call["arguments"]) if is_tool else '{"error": "there is no such tool"}'
                outputs.append({"type": "function_call_output", "call_id": call["call_id"], "output": answer})
        return {**response, "output": outputs, "usage": None}


def load(name: str, arguments: dict[str, Any]) -> NemoGymEnvironment:
    """Return the environment of the server at `url`."""
    if "url" not in arguments:
        raise ValueError('environment.arguments has no url: name the server, {url = "http://127.0.0.1:8000"}')
    return NemoGymEnvironment(arguments)
