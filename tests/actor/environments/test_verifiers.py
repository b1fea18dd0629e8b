"""An environment of the released `verifiers` package is played as it is: its tasks, its harness, its rewards, its failures."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from offbeat.actor.environments.messages import Begin, Ended, Failed, FromWorker, PlayEpisode, SampleTurn, TurnSampled
from offbeat.actor.environments.worker_starts import WorkerStarts
from offbeat.actor.environments.workers import Workers
from offbeat.common.settings.config import Environment, EnvironmentSection
from offbeat.common.settings.loading import load
from offbeat.common.user_code.external_environment import environment_rows
from tests.conftest import ALPHABET

PYTHON = os.environ.get("OFFBEAT_TEST_VERIFIERS", "")
"""A Python that has `verifiers`; `.ci/extras` makes one."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extras,
    pytest.mark.skipif(not PYTHON, reason="OFFBEAT_TEST_VERIFIERS names no Python with verifiers"),
]

TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str
    turns: list[str] = []

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "raise":
            raise KeyError("answer")
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def lengths(self, trace: vf.Trace) -> dict[str, float]:
        return {"length/in characters": float(len(trace.last_reply)), "started_at": 1.7e9}

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

class SumConfig(vf.TasksetConfig):
    largest: int = 3

class SumEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            for turn in task.data.turns:
                await interaction.turn(turn)

class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        return [
            SumTask(SumData(prompt=f"1+{n}=", answer=str(1 + n), turns=["+1="] if n == 2 else []), self.config.task)
            for n in range(1, self.config.largest + 1)
        ]

__all__ = ["SumTaskset", "SumEnv"]
"""
SOLVER_AND_CHECKER = """
class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    checker: vf.AgentConfig = vf.AgentConfig()

class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        for agent in (agents.solver, agents.solver, agents.checker):
            await agent.run(task)

__all__ = ["SumTaskset", "PairEnv"]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("tasks") / "small_sums"
    folder.mkdir()
    (folder / "__init__.py").write_text(TASKSET)
    return Environment(f"verifiers:{folder}", PYTHON, arguments={"taskset": {"largest": 2}, "agent": {"max_turns": 2}})


def started(model: Path, environment: Environment) -> Workers:
    limits = load(None, [f"task.environment={environment.function}", "model.max_length=40", "train.micro_batch_tokens=80"])
    settings = EnvironmentSection(python=PYTHON, arguments=dict(environment.arguments))
    begin = Begin(config=replace(limits, environment=settings), model=str(model))
    return Workers(begin, WorkerStarts(forks=False, has_parser=False))


@pytest.fixture(scope="module")
def workers(tiny_model: Path, environment: Environment) -> Iterator[Workers]:
    workers = started(tiny_model, environment)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def rows(environment: Environment) -> list[dict[str, object]]:
    return list(environment_rows(environment, "task-environment:train", "data.train_data"))


def next_one(workers: Workers) -> FromWorker:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for one in list(workers.poll()):
            assert not isinstance(one, str), "the worker has died"
            return one
        time.sleep(0.01)
    raise AssertionError("nothing arrived")


def play(workers: Workers, row: dict[str, object], *answers: str) -> FromWorker:
    message = PlayEpisode(
        episode="1/0/0", row=json.dumps(row), prompt="1+1=", num_prompt_tokens=4, max_new_tokens=8, seed=7, is_evaluation=False
    )
    workers.play("1/0/0", message)
    for turn, answer in enumerate(answers):
        assert isinstance(next_one(workers), SampleTurn)
        token_ids = [ALPHABET.index(character) + 4 for character in answer]
        workers.send("1/0/0", TurnSampled(episode="1/0/0", turn=turn, token_ids=token_ids, finish_reason="stop"))
    end = next_one(workers)
    workers.end("1/0/0")
    return end


def test_tasks_are_rows_with_the_prompt_as_messages(rows: list[dict[str, object]]) -> None:
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": f"1+{n}="}] for n in (1, 2)]


def test_weighted_rewards_are_parts_and_metrics_are_shown(workers: Workers, rows: list[dict[str, object]]) -> None:
    end = play(workers, rows[0], "2")
    assert isinstance(end, Ended)
    assert end.reward == 2.0
    assert end.parts == {
        "right": 2.0, "characters": 1.0, "length_in_characters": 1.0, "turns": 1.0, "repeated_requests": 0.0
    }  # fmt: skip


def test_metrics_have_other_names_where_ours_forbid_them_and_none_beyond_a_part(
    workers: Workers, rows: list[dict[str, object]]
) -> None:
    end = play(workers, rows[0], "2")
    assert isinstance(end, Ended)
    assert end.parts["length_in_characters"] == 1.0
    assert "started_at" not in end.parts


def test_scripted_user_goes_on_in_the_same_sequence(workers: Workers, rows: list[dict[str, object]]) -> None:
    end = play(workers, rows[1], "3", "4")
    assert isinstance(end, Ended)
    assert (end.reward, end.parts["turns"]) == (0.0, 2.0)


def test_scoring_that_raises_is_no_reward_of_zero(workers: Workers, rows: list[dict[str, object]]) -> None:
    task = {**rows[0]["task"], "answer": "raise"}  # pyright: ignore[reportGeneralTypeIssues]
    end = play(workers, {**rows[0], "task": task}, "2")
    assert isinstance(end, Failed)
    assert not end.is_transient
    assert "TaskError" in end.detail


def test_each_trace_of_an_episode_earns_what_it_was_worth(
    tiny_model: Path, tmp_path: Path, rows: list[dict[str, object]]
) -> None:
    folder = tmp_path / "pairs"
    folder.mkdir()
    (folder / "__init__.py").write_text(TASKSET + SOLVER_AND_CHECKER)
    workers = started(tiny_model, Environment(f"verifiers:{folder}", PYTHON))
    end = play(workers, rows[0], "3", "2", "2")
    workers.close()
    assert isinstance(end, Ended)
    # Of the solver's two attempts the second one was right, and counts half.
    assert (end.reward, end.branch_rewards) == (3.0, {0: 0.0, 1: 1.0, 2: 2.0})
    assert end.parts.items() >= {"solver.right": 1.0, "checker.right": 2.0, "checker.characters": 1.0}.items()
