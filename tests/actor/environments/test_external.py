"""An environment plays in a Python of its own; whatever it does there becomes an event of its episode, or of its worker."""

import asyncio
import io
import json
import math
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from offbeat.actor.environments.chat import Chat
from offbeat.actor.environments.external import ExternalEnvironment
from offbeat.actor.environments.messages import (
    Begin,
    CancelEpisode,
    Ended,
    Failed,
    FromWorker,
    PlayEpisode,
    SampleTurn,
    TurnSampled,
)
from offbeat.actor.environments.worker_starts import WorkerStarts
from offbeat.actor.environments.workers import Workers
from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.processes import process_table as processes
from offbeat.common.settings.config import FRAMEWORKS, Environment, EnvironmentSection
from offbeat.common.settings.loading import load
from offbeat.common.user_code import external_environment
from offbeat.common.user_code.environment_host import host
from offbeat.common.user_code.external_environment import check_external, environment_rows, interpreter

pytestmark = pytest.mark.slow

FUNCTIONS = """
import asyncio, os, sys, time

def play(chat, row, bonus=0):
    kind = row["kind"]
    print("printed", kind, flush=True)
    if kind == "exit":
        os._exit(3)
    if kind == "garbage":
        os.write(4, b"no JSON\\n")
    if kind == "look":
        secrets = [name for name in os.environ if name.startswith("OFFBEAT") and name != "OFFBEAT_GUARD"]
        return {"secrets": len(secrets), "key": float("JUDGE" in os.environ)}
    if kind == "nan":
        return float("nan")
    if kind == "mistake":
        return row["answer"]
    if kind == "unreachable":
        raise ConnectionError("no judge")
    if kind == "quits":
        raise SystemExit("bye")
    if kind == "agents":
        for agent in ("first", "second"):
            chat.ask([{"role": "user", "content": "1+1="}], agent)
        chat.reward(0.5, "first")
        chat.reward(1.5, "second")
        return chat.reward(4.0, "unheard")
    if kind == "greedy":
        messages = []
        while True:
            messages.append({"role": "user", "content": "1+1="})
            messages.append(chat.ask(messages, "player"))
            chat.metric("turns", len(messages) // 2)
            chat.reward(0.5)
            chat.reward(0.25, "player")
    answer = chat.ask([{"role": "user", "content": "1+1="}])
    chat.metric("characters", len(answer["content"]))
    return {"right": float(answer["content"] == row["answer"]), "bonus": bonus}

async def block(chat, row):
    print("blocked", flush=True)
    time.sleep(600)

def rows(split, bonus=0):
    number = 0
    while split != "slow" or number < 3:
        if split == "slow":
            time.sleep(0.5)
        yield {"prompt": f"{split} {number}", "bonus": bonus}
        number += 1
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The functions are in the current folder."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "outside_games.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        yield folder


def begin(model: Path, function: str = "outside_games:play") -> Begin:
    arguments = {"bonus": 2} if function.endswith("play") else {}
    settings = EnvironmentSection(python=sys.executable, arguments=arguments)
    limits = load(None, [f"task.environment={function}", "model.max_length=20", "train.micro_batch_tokens=40"])
    return Begin(config=replace(limits, environment=settings), model=str(model))


@pytest.fixture(scope="module")
def workers(tiny_model: Path, forks: WorkerStarts) -> Iterator[Workers]:
    workers = Workers(begin(tiny_model), forks)
    yield workers
    workers.close()


def play(workers: Workers, episode: str, kind: str = "right") -> None:
    row = json.dumps({"kind": kind, "answer": "2"} if kind == "right" else {"kind": kind})
    message = PlayEpisode(
        episode=episode, row=row, prompt="1+1=", num_prompt_tokens=4, max_new_tokens=8, seed=7, is_evaluation=False
    )
    workers.play(episode, message)


def next_news(workers: Workers, claim: Callable[[], bool] = lambda: False, at_least: int = 1) -> list[FromWorker | str]:
    """Return what arrives next; with `claim`, return when it holds."""
    deadline = time.monotonic() + 60
    news: list[FromWorker | str] = []
    while time.monotonic() < deadline:
        news += workers.poll()
        if len(news) >= at_least or claim():
            for one in news:
                if isinstance(one, Ended | Failed):
                    workers.end(one.episode)
            return news
        time.sleep(0.01)
    raise AssertionError("nothing arrived")


def hosts() -> list[int]:
    own = processes.descendants(os.getpid())
    return [pid for pid in own if str(external_environment.HOST) in processes.arguments(pid)]


def test_episode_asks_the_model_and_returns_parts_and_metrics(workers: Workers) -> None:
    play(workers, "1/0/0")
    (asked,) = next_news(workers)
    assert isinstance(asked, SampleTurn)
    workers.send("1/0/0", TurnSampled(episode="1/0/0", turn=0, token_ids=[6], finish_reason="stop"))
    (ended,) = next_news(workers)
    assert isinstance(ended, Ended)
    assert ended.parts == {"right": 1.0, "bonus": 2.0, "characters": 1.0, "repeated_requests": 0.0}
    assert ended.reward == 3.0


def test_agents_of_one_episode_earn_rewards_of_their_own(workers: Workers) -> None:
    play(workers, "1/0/0", "agents")
    for turn in range(2):
        (asked,) = next_news(workers)
        # Neither continues the other.
        assert isinstance(asked, SampleTurn)
        assert asked.back == 0
        workers.send("1/0/0", TurnSampled(episode="1/0/0", turn=turn, token_ids=[6], finish_reason="stop"))
    (ended,) = next_news(workers)
    assert isinstance(ended, Ended)
    assert (ended.reward, ended.branch_rewards, ended.turn_rewards) == (6.0, {0: 0.5, 1: 1.5}, {1: 6.0})


def test_episode_without_room_keeps_the_rewards_and_metrics_it_has(workers: Workers) -> None:
    play(workers, "1/0/0", "greedy")
    for turn in range(2):
        assert isinstance(next_news(workers)[0], SampleTurn)
        # Of 20 tokens the questions have 4 each, and leave 8 and 4.
        sampled = TurnSampled(episode="1/0/0", turn=turn, token_ids=[6] * (8 - 4 * turn), finish_reason="length")
        workers.send("1/0/0", sampled)
    assert next_news(workers) == [
        Ended(
            episode="1/0/0",
            reward=1.5,
            parts={"turns": 2.0, "repeated_requests": 0.0},
            is_out_of_room=True,
            turn_rewards={1: 1.5},
            branch_rewards={1: 0.5},
        )
    ]


@pytest.mark.parametrize(
    ("kind", "is_transient", "detail"),
    [
        ("mistake", False, "EpisodeFailed: KeyError: 'answer'"),
        ("unreachable", True, "RewardUnavailable: ConnectionError: no judge"),
        ("quits", False, "EpisodeFailed: SystemExit: bye"),
        ("nan", False, "TypeError: the reward is nan"),
    ],
)
def test_function_that_raises_fails_its_episode_alone(workers: Workers, kind: str, is_transient: bool, detail: str) -> None:
    play(workers, "1/0/0", kind)
    (failed,) = next_news(workers)
    assert isinstance(failed, Failed)
    assert failed.is_transient == is_transient
    assert detail.partition(":")[2] in failed.detail
    play(workers, "2/0/0")
    assert isinstance(next_news(workers)[-1], SampleTurn)
    workers.send("2/0/0", CancelEpisode(episode="2/0/0"))
    assert next_news(workers) == [Failed(episode="2/0/0", is_transient=True, detail="cancelled")]


def test_traceback_of_the_other_process_is_handed_on(workers: Workers) -> None:
    play(workers, "1/0/0", "mistake")
    (failed,) = next_news(workers)
    assert isinstance(failed, Failed)
    assert 'return row["answer"]' in failed.traceback


def test_process_has_no_secret_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_JUDGE", "{}")
    monkeypatch.setenv("JUDGE", "secret")

    class Looking(Chat):
        """An episode whose model is never asked."""

        url, key, prompt, seed, is_evaluation = "", "1/0/0", "", 7, False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

        def __init__(self) -> None:
            pass

    async def look() -> object:
        environment = await ExternalEnvironment.start(Environment("outside_games:play", sys.executable), "JUDGE")
        parts = await environment(Looking(), {"kind": "look"})
        # It would end this process with the host.
        for task in environment._tasks:
            task.cancel()
        environment._process.kill()
        await environment._process.wait()
        return parts

    assert asyncio.run(look()) == {"secrets": 0, "key": 0.0}


@pytest.mark.parametrize("kind", ["exit", "garbage"])
def test_process_that_ends_or_breaks_the_protocol_gives_its_episodes_back(
    tiny_model: Path, forks: WorkerStarts, kind: str
) -> None:
    before = hosts()
    workers = Workers(begin(tiny_model), forks)
    play(workers, "1/0/0")
    assert isinstance(next_news(workers)[-1], SampleTurn)
    play(workers, "2/0/0", kind)
    assert next_news(workers, at_least=2) == ["1/0/0", "2/0/0"]
    assert workers.num_restarts == 1
    play(workers, "1/0/1")
    assert isinstance(next_news(workers)[-1], SampleTurn)
    workers.close()
    next_news(workers, lambda: hosts() == before)


def test_blocked_process_is_killed_with_its_worker(tiny_model: Path, forks: WorkerStarts) -> None:
    before = set(hosts())
    workers = Workers(begin(tiny_model, "outside_games:block"), forks)
    (pid,) = set(hosts()) - before
    play(workers, "1/0/0")
    workers.send("1/0/0", CancelEpisode(episode="1/0/0"))
    # Another episode begins behind the cancelled one, and the worker answers for neither.
    play(workers, "2/0/0")
    waited_until = time.monotonic() + 1.5
    silence = next_news(workers, lambda: time.monotonic() > waited_until)
    assert silence == [], "the host answers nothing, so neither does the worker"
    assert list(workers.kill_worker_of("1/0/0", "it blocks")) == ["1/0/0", "2/0/0"]
    next_news(workers, lambda: processes.has_ended(pid))
    workers.close()


def test_environment_that_cannot_be_loaded_is_refused_with_its_python(tiny_model: Path, forks: WorkerStarts) -> None:
    with pytest.raises(ServiceError, match=r"outside_games:none.*in its Python.*has no function 'none'"):
        Workers(begin(tiny_model, "outside_games:none"), forks)
    with pytest.raises(SettingError, match=r"No module named 'nowhere'"):
        check_external(Environment("nowhere:play", sys.executable))
    with pytest.raises(SettingError, match=r'environment\.python = "/no/python": there is no such program'):
        check_external(Environment("outside_games:play", "/no/python"))
    with pytest.raises(
        SettingError, match=r'environment\.python = "/bin/echo": the program has written .* instead of a message'
    ):
        check_external(Environment("outside_games:play", "/bin/echo"))


def test_endless_rows_are_cut_by_size_and_begin_after_skip() -> None:
    environment = Environment("outside_games:play", sys.executable, arguments={"bonus": 3})
    rows = environment_rows(environment, "task-environment:test?size=2&skip=5", "data.eval_data")
    assert list(rows) == [{"prompt": "test 5", "bonus": 3}, {"prompt": "test 6", "bonus": 3}]


def test_rows_may_hold_missing_numbers_as_tables_have_them() -> None:
    environment = Environment("outside_games:play", sys.executable, arguments={"bonus": math.nan})
    (row,) = environment_rows(environment, "task-environment:train?size=1", "data.train_data")
    assert math.isnan(row["bonus"])


def test_rows_without_a_python_of_their_own_are_refused() -> None:
    with pytest.raises(SettingError, match=r"data\.train_data.*offers no rows.*environment\.python"):
        list(environment_rows(Environment("outside_games:play"), "task-environment:train", "data.train_data"))


def test_requirements_are_installed_once_and_a_failure_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for uv: it makes the interpreter, and refuses the package `wrong`."""
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        '#!/bin/sh\necho "$@" >> calls\ncase "$1 $2" in\n"venv --quiet") mkdir -p "$5/bin"; touch "$5/bin/python";;\n'
        '*) for file; do :; done; if grep -q wrong "$file"; then echo "no package wrong"; exit 1; fi;;\nesac\n'
    )
    uv.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "needs.txt"
    file.write_text("verifiers==0.4.0\n")
    environment = Environment("verifiers:reverse-text", requirements=str(file))
    python = interpreter(environment)
    assert interpreter(environment) == python
    assert (tmp_path / "calls").read_text().count("pip install") == 1
    file.write_text("wrong\n")
    with pytest.raises(SettingError, match=r"environment\.requirements.*needs\.txt.*cannot be installed.*no package wrong"):
        interpreter(environment)
    assert interpreter(environment._replace(requirements="", python=sys.executable)) == sys.executable


def test_host_knows_the_frameworks_of_the_settings_and_needs_no_package() -> None:
    assert host.FRAMEWORKS == FRAMEWORKS
    text = external_environment.HOST.read_text()
    imported = {line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= sys.stdlib_module_names


def test_only_a_turn_that_does_not_fit_is_no_text() -> None:
    class Refused(host.HostedChat):
        def __init__(self, answer: str) -> None:
            self.answer = answer

        def ask(self, messages: list[dict[str, Any]], agent: str = "", **fields: Any) -> dict[str, Any]:
            raise urllib.error.HTTPError("", 400, self.answer, Message(), None)

    assert Refused('{"error": {"code": "context_length_exceeded"}}').next_text([]) is None
    with pytest.raises(urllib.error.HTTPError, match="no such role"):
        Refused('{"error": {"message": "no such role"}}').next_text([])


class RepeatingModel(host.HostedChat):
    """A model that fell into repeating itself, as models do early in their training."""

    def __init__(self, text: str) -> None:
        super().__init__({"url": "", "episode": "0", "seed": 0, "prompt": "", "is_evaluation": False})
        self._text = text

    def next_text(self, messages: list[dict[str, Any]]) -> str | None:
        return self._text


@pytest.mark.parametrize("text", ["1" * 5000, "[" * 100_000], ids=["digits", "brackets"])
def test_answer_that_python_does_not_read_as_a_number_or_list_is_no_action(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    class Discrete:
        start, n = 0, 4

    class World:
        action_space, metadata, unwrapped = Discrete(), {}, SimpleNamespace(render_mode=None)

        def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
            return "a lake", {}

        def close(self) -> None:
            pass

    spaces = SimpleNamespace(Discrete=Discrete)
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=lambda _: World(), spaces=spaces))
    chat = RepeatingModel(text)
    arguments = {"max_turns": 2, "without_action": -0.5}
    assert host.load("gymnasium:Lake-v1", arguments).play(chat, {"seed": 1}) == {"reward": -1.0}
    assert chat.metrics == {"turns": 2.0, "without_action": 2.0}

    class Client:
        def __init__(self, base_url: str) -> None:
            pass

        async def __aenter__(self) -> "Client":
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def reset(self, **options: object) -> SimpleNamespace:
            return SimpleNamespace(observation={"text": "guess"}, done=False, reward=None)

    schema = {"action": {"properties": {"guess": {"type": "integer"}}, "required": ["guess"]}}
    monkeypatch.setitem(sys.modules, "openenv", SimpleNamespace(GenericEnvClient=Client))
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(json.dumps(schema).encode()))
    environment = host.load("openenv:guess", {"url": "http://nowhere", **arguments})
    assert asyncio.run(environment.play(RepeatingModel(text), {"seed": 1})) == {"reward": -1.0}


def test_host_ends_in_silence_where_the_process_that_started_it_is_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(external_environment.HOST), "no_such_module:play", "{}"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def start_host(function: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(external_environment.HOST), f"outside_games:{function}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_host_ends_with_its_input_also_where_the_environment_blocks_it() -> None:
    one = start_host("block")
    assert one.stdin is not None and one.stderr is not None
    start = {"episode": "1/0/0", "url": "", "row": {}, "prompt": "", "seed": 1, "is_evaluation": False}
    one.stdin.write(json.dumps({"type": "start", **start}) + "\n")
    one.stdin.flush()
    assert one.stderr.readline() == "blocked\n"
    one.communicate(timeout=60)
    assert one.returncode == 0


def test_host_sends_rows_to_their_end_after_the_end_of_its_input() -> None:
    output, _ = start_host("play").communicate('{"type": "rows", "split": "slow", "skip": 0, "size": null}\n', timeout=60)
    assert [json.loads(line)["type"] for line in output.splitlines()] == ["ready", "row", "row", "row", "rows_end"]


def test_two_plain_functions_play_at_once_in_the_host() -> None:
    """They wait for each other."""

    async def both() -> list[object]:
        barrier = __import__("threading").Barrier(2)

        class Pair:
            @staticmethod
            def play(chat: object, row: object) -> int:
                return barrier.wait(5)

        sent: list[dict[str, object]] = []

        class Lines:
            def send(self, **message: object) -> None:
                sent.append(message)

        one = host.EnvironmentHost(Pair, {}, Lines())  # pyright: ignore[reportArgumentType]
        for name in "ab":
            one.handle(
                {
                    "type": "start",
                    "episode": name,
                    "url": "",
                    "seed": 0,
                    "prompt": "",
                    "is_evaluation": False,
                    "row": {},
                }
            )
        while len(sent) < 2:
            await asyncio.sleep(0.01)
        return [message["type"] for message in sent]

    assert asyncio.run(both()) == ["end", "end"]
