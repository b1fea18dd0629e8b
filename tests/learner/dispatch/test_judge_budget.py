"""The judge's budget holds for the whole run: over actors, their restarts and the learner's."""

from pathlib import Path

import msgspec
import pytest

from offbeat.common.records.rows import ActorRow, Row, encode_row
from offbeat.common.settings.config import Config, JudgeSection, RunSection
from offbeat.learner.dispatch.run_state import LeaseFailures, RunFailedError, within_budget
from offbeat.protocols.messages import ActorHeartbeat, ActorStats
from tests.learner.dispatch.dispatch_desk import Actor, Desk


def row(actor: str, tokens: float) -> ActorRow:
    return ActorRow(
        actor=actor, policy_version=0, num_generated_tokens=0, num_groups_sent=0, num_running_completions=0, seconds={},
        judge={"tokens": tokens, "requests": 1.0},
    )  # fmt: skip


def test_run_ends_when_all_its_actors_together_have_spent_the_budget(tmp_path: Path) -> None:
    woken: list[bool] = []
    failures = LeaseFailures(3, lambda: woken.append(True))
    config = Config(judge=JudgeSection(url="http://h/v1", budget_tokens=100), run=RunSection(dir=str(tmp_path)))
    recorded: list[Row] = []
    record = within_budget(config, failures, recorded.append)
    # a restarts after 40 and tells 30 of its new process; b tells 20 twice.
    for number, one in enumerate([row("a", 10), row("a", 40), row("b", 20), row("a", 30), row("b", 20)]):
        assert failures.error is None, number
        record(one)
    assert failures.error is None
    record(row("b", 30))
    assert isinstance(failures.error, RunFailedError)
    assert "judge.budget_tokens = 100" in str(failures.error)
    record(row("b", 31))
    assert (len(recorded), len(woken)) == (7, 1)

    # The next learner of the run goes on from there; the actors were never restarted.
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(encode_row, recorded)))
    resumed = msgspec.structs.replace(
        config, run=RunSection(dir=str(tmp_path), resume=True), judge=JudgeSection(url="http://h/v1", budget_tokens=110)
    )
    failures = LeaseFailures(3, lambda: None)
    record = within_budget(resumed, failures, recorded.append)
    record(row("b", 39))
    assert failures.error is None, "101 + 8 tokens"
    record(row("b", 40))
    assert failures.error is not None


def test_heartbeat_that_tells_of_a_spent_budget_ends_the_run() -> None:
    desk = Desk("judge.url=http://h/v1", "judge.model=m", "judge.budget_tokens=100")
    actor = Actor(desk, "a").join(capacity=1)
    for tokens in (99.0, 100.0):
        assert desk.dispatcher.take_batch(0) is None
        stats = ActorStats(judge={"tokens": tokens})
        actor.say(ActorHeartbeat(policy_version=0, stats=stats, lease_ids=(), seen_lease_id=-1))
        desk.tick(5.0, actor)
    with pytest.raises(RunFailedError, match="100 tokens"):
        desk.dispatcher.take_batch(0)


def test_without_a_budget_nothing_is_counted() -> None:
    recorded: list[Row] = []
    assert (
        within_budget(Config(judge=JudgeSection(url="http://h/v1")), LeaseFailures(3, lambda: None), recorded.append)
        == recorded.append
    )
