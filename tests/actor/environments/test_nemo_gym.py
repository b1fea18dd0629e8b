"""Resource servers of NeMo Gym, here one of the published schema, are played by the host at the endpoint of an episode."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from offbeat.actor.rewards.functions import reward_of
from offbeat.common.user_code.environment_host import host
from tests.actor.environments.endpoint.endpoint_harness import playing

TOOLS = [
    {
        "type": "function",
        "name": "deposit",
        "description": "Add to the account.",
        "parameters": {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]},
        "strict": True,
    },
    {"type": "function", "name": "balance", "parameters": {"type": "object", "properties": {}}, "strict": True},
]
ROW: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "Deposit 2."}], "tools": TOOLS},
    "opening": 5,
    "expected": 7,
}
Answer = tuple[int, Any]


class Bank(ThreadingHTTPServer):
    """Keeps an account for each session. `answers` are given in place of its own, by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), BankHandler)
        self.paths = ["/seed_session", "/verify", "/deposit", "/balance"]
        self.accounts: dict[str, int] = {}
        self.answers: dict[str, Answer] = {}
        self.requests: list[str] = []
        self.verified: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, session: str, body: Any) -> Answer:
        self.requests.append(path)
        if path in self.answers:
            return self.answers[path]
        if path == "/seed_session":
            self.accounts[session] = body["opening"]
            return 200, {}
        if session not in self.accounts:
            return 400, {"detail": "no session"}
        if path == "/deposit":
            if not isinstance(body.get("amount"), int):
                return 422, {"detail": "amount is no integer"}
            self.accounts[session] += body["amount"]
            return 200, {"success": True}
        if path == "/balance":
            return 200, {"balance": self.accounts[session]}
        self.verified.append(body)
        is_right = self.accounts[session] == body["expected"]
        return 200, {**body, "reward": float(is_right), "is_right": is_right, "7 days": 2, "time": 1.7e9, "note": "none"}


class BankHandler(BaseHTTPRequestHandler):
    @property
    def bank(self) -> Bank:
        assert isinstance(self.server, Bank)
        return self.server

    def do_GET(self) -> None:
        is_known = self.path == "/openapi.json"
        self._send(200 if is_known else 404, {"paths": dict.fromkeys(self.bank.paths)})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cookie = self.headers.get("Cookie", "")
        session = cookie.partition("bank___1=")[2] or f"session{len(self.bank.accounts)}"
        status, answer = self.bank.answer(self.path, session, body)
        self._send(status, answer, f"bank___1={session}; path=/; Max-Age=1209600; httponly; samesite=lax")

    def _send(self, status: int, answer: Any, cookie: str = "") -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture
def bank() -> Iterator[Bank]:
    bank = Bank()
    yield bank
    bank.shutdown()
    bank.server_close()


class Lines(list[dict[str, Any]]):
    def send(self, **message: Any) -> None:
        self.append(message)


async def ends_of(bank: Bank, *episodes: list[str], row: dict[str, Any] = ROW, **arguments: Any) -> list[dict[str, Any]]:
    """Return the host's message at the end of each episode, which are played one after another."""
    environment = host.load("nemo_gym:bank", {"url": bank.url, **arguments})
    sent = Lines()
    player = host.EnvironmentHost(environment, {}, sent)  # pyright: ignore[reportArgumentType]
    for number, turns in enumerate(episodes):
        async with playing(max_length=300) as game:
            game.write(*turns)
            start = {"type": "start", "episode": str(number), "url": game.url, "row": row}
            player.handle({**start, "prompt": "", "seed": 1, "is_evaluation": False})
            while len(sent) == number:
                await asyncio.sleep(0.005)
    return sent


def end_of(bank: Bank, *turns: str, row: dict[str, Any] = ROW, **arguments: Any) -> dict[str, Any]:
    (end,) = asyncio.run(ends_of(bank, list(turns), row=row, **arguments))
    return end


def read_by_model(bank: Bank, *turns: str) -> list[str]:
    """Return what the tools answered."""
    end_of(bank, *turns)
    return [item["output"] for item in bank.verified[0]["response"]["output"] if item["type"] == "function_call_output"]


def test_row_is_played_by_tool_calls_and_the_whole_response_is_verified(bank: Bank) -> None:
    end = end_of(bank, 'first <call>deposit{"amount": 2}</call><call>balance{}</call>', "It is 7.")
    assert (end["type"], end["reward"]) == ("end", {"reward": 1.0}), end
    assert bank.requests == ["/seed_session", "/deposit", "/balance", "/verify"]
    (verified,) = bank.verified
    assert {name: verified[name] for name in ROW} == ROW
    output = verified["response"]["output"]
    kinds = ["message", "function_call", "function_call", "function_call_output", "function_call_output", "message"]
    assert [item["type"] for item in output] == kinds
    assert output[3] == {"type": "function_call_output", "call_id": output[1]["call_id"], "output": '{"success": true}'}
    assert json.loads(output[4]["output"]) == {"balance": 7}
    assert output[5]["content"][0]["text"] == "It is 7."
    assert verified["response"]["object"] == "response"


def test_numbers_beside_the_reward_are_shown_but_not_the_rows_own_or_ones_too_large_for_a_part(bank: Bank) -> None:
    end = end_of(bank, "no")
    assert end["reward"] == {"reward": 0.0}
    assert end["metrics"] == {"turns": 1.0, "is_right": 0.0, "_7_days": 2.0}
    assert reward_of(end["metrics"], {}).parts == end["metrics"]


def test_components_of_a_reward_are_shown_and_not_added_to_it(bank: Bank) -> None:
    bank.answers["/verify"] = 200, {"reward": 3, "reward_components": {"format": 1, "right": 2}}
    end = end_of(bank, "yes")
    assert (end["reward"], end["metrics"]) == ({"reward": 3}, {"turns": 1.0, "format": 1.0, "right": 2.0})


def test_more_numbers_than_a_reward_has_parts_are_cut(bank: Bank) -> None:
    bank.answers["/verify"] = 200, {"reward": 1.0, **{f"part{number}": number for number in range(40)}}
    end = end_of(bank, "yes")
    assert reward_of({**end["reward"], **end["metrics"]}, {}).parts["part23"] == 23


def test_each_episode_has_a_session_of_its_own(bank: Bank) -> None:
    turns = ['<call>deposit{"amount": 2}</call>', "done"]
    ends = asyncio.run(ends_of(bank, turns, turns))
    assert [end["reward"] for end in ends] == [{"reward": 1.0}] * 2
    assert list(bank.accounts.values()) == [7, 7]


def test_model_reads_the_errors_of_tools(bank: Bank) -> None:
    """500 is how NeMo Gym's servers answer when a tool has raised."""
    bank.answers["/balance"] = 500, "KeyError('account')"
    turns = ["<call>deposit{2}</call>", '<call>deposit{"amount": "two"}</call>', "<call>balance{}</call>", "done"]
    broken, wrong, raised = read_by_model(bank, *turns)
    assert broken.startswith('{"error": "the arguments are no JSON')
    assert (wrong, raised) == ('{"detail": "amount is no integer"}', "\"KeyError('account')\"")


@pytest.mark.parametrize("arguments", ['{"amount": ' + "1" * 5000 + "}", "[" * 100_000], ids=["digits", "brackets"])
def test_arguments_that_python_does_not_read_are_an_error_for_the_model(bank: Bank, arguments: str) -> None:
    host.load("nemo_gym:bank", {"url": bank.url})
    session = sys.modules["nemo_gym_environment"].Session(bank.url)
    assert session.call("deposit", arguments).startswith('{"error": "the arguments are no JSON')


def test_model_cannot_call_the_servers_own_paths(bank: Bank) -> None:
    assert read_by_model(bank, "<call>verify{}</call>", "done") == ['{"error": "there is no such tool"}']
    assert bank.requests.count("/verify") == 1


@pytest.mark.parametrize("path", ["/seed_session", "/deposit", "/verify"])
def test_server_that_is_away_ends_the_attempt(bank: Bank, path: str) -> None:
    bank.answers[path] = 503, {"detail": "busy"}
    end = end_of(bank, '<call>deposit{"amount": 2}</call>', "done")
    assert (end["type"], end["is_transient"]) == ("failed", True)
    assert "503" in end["error"] and "busy" in end["error"]


def test_server_that_has_gone_ends_the_attempt(bank: Bank) -> None:
    environment = host.load("nemo_gym:bank", {"url": bank.url})
    bank.shutdown()
    bank.server_close()
    with pytest.raises(OSError, match="refused") as caught:
        environment.play(None, ROW)
    assert host.is_transient(caught.value)


def test_reward_of_a_judge_that_failed_is_no_zero(bank: Bank) -> None:
    failure = {"_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "HTTP 401"}
    bank.answers["/verify"] = 200, {"reward": 0.0, **failure}
    end = end_of(bank, "done")
    assert (end["type"], end["is_transient"]) == ("failed", True)
    assert "judge_failed: HTTP 401" in end["error"]


@pytest.mark.parametrize("verdict", [{}, {"reward": None}, {"reward": "good"}, {"reward": float("nan")}])
def test_reward_that_is_no_number_is_an_error(bank: Bank, verdict: dict[str, Any]) -> None:
    bank.answers["/verify"] = 200, verdict
    with pytest.raises((TypeError, ValueError), match="part 'reward'"):
        reward_of(end_of(bank, "done")["reward"], {})


def test_refusal_of_the_server_is_an_error_that_shows_its_reason(bank: Bank) -> None:
    bank.answers["/verify"] = 422, {"detail": "expected is missing"}
    end = end_of(bank, "done")
    assert (end["type"], end["is_transient"]) == ("failed", False)
    assert "expected is missing" in end["error"]


def test_answer_without_end_is_an_error(bank: Bank) -> None:
    bank.answers["/balance"] = 200, "x" * (17 << 20)
    end = end_of(bank, "<call>balance{}</call>", "done")
    assert (end["type"], end["is_transient"]) == ("failed", False)
    assert "/balance answered with more than 16 MiB" in end["error"]


def test_turns_that_no_longer_fit_are_verified_as_they_are(bank: Bank) -> None:
    end = end_of(bank, '<call>deposit{"amount": 2}</call>' + "." * 300, "never read")
    assert end["reward"] == {"reward": 1.0}, end
    assert end["metrics"]["turns"] == 1.0


def test_turn_that_was_cut_is_the_last_and_verified_as_incomplete(bank: Bank) -> None:
    turn = '<call>deposit{"amount": 2}</call>'
    request = {**ROW["responses_create_params"], "max_output_tokens": len(turn) - 1, "stream": True}
    end = end_of(bank, turn, "never read", row={**ROW, "responses_create_params": request})
    assert (end["reward"], end["metrics"]["turns"]) == ({"reward": 0.0}, 1.0)
    assert "/deposit" not in bank.requests
    assert bank.verified[0]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_last_turn_of_max_turns_may_call_tools(bank: Bank) -> None:
    end = end_of(bank, '<call>deposit{"amount": 2}</call>', "never read", max_turns=1)
    assert end["reward"] == {"reward": 1.0}


def test_null_fields_of_a_request_are_left_out_and_another_temperature_is_refused(bank: Bank) -> None:
    nulls = {"model": None, "temperature": 1.0, "top_p": None, "metadata": None, "stream": None}
    assert end_of(bank, "x", row={**ROW, "responses_create_params": {"input": "Hi.", **nulls}})["type"] == "end"
    end = end_of(bank, row={**ROW, "responses_create_params": {"input": "Hi.", "temperature": 0.5}})
    assert (end["type"], end["is_transient"]) == ("failed", False)
    assert "environment.sampling" in end["error"]


def test_server_without_verification_and_rows_of_other_data_are_refused(bank: Bank) -> None:
    with pytest.raises(ValueError, match="responses_create_params"):
        host.load("nemo_gym:bank", {"url": bank.url}).play(None, {"prompt": "Hi."})
    bank.paths = ["/reset", "/step"]
    with pytest.raises(ValueError, match="has no /seed_session and no /verify"):
        host.load("nemo_gym:bank", {"url": bank.url})
    with pytest.raises(ValueError, match=r"url = .*/elsewhere': no resource server answers there.*404.*correct"):
        host.load("nemo_gym:bank", {"url": f"{bank.url}/elsewhere/"})
    with pytest.raises(ValueError, match=r"environment\.arguments has no url"):
        host.load("nemo_gym:bank", {})
