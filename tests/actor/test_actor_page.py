"""An actor answers monitors truthfully: a loop that hangs is ill, one without a learner is not, and numbers are the loop's."""

import re
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from offbeat.actor.page import EXPORTED, ActorPage, families, serving
from offbeat.common.errors import SettingError
from offbeat.common.records.exported import TURNED_WITHIN_S, numbers
from offbeat.protocols.messages import ActorHeartbeat, ActorStats, RewardTrouble
from tests.actor.actor_harness import PATIENCE_S, Actor, Learner, actor_of, eventually

HEARTBEAT = ActorHeartbeat(
    policy_version=3,
    stats=ActorStats(
        num_generated_tokens=500,
        num_groups_sent=4,
        num_running_completions=2,
        seconds={"generate": 1.5, "wait_leases": 0.5},
        judge={"requests": 7.0, "failed": 1.0, "cached": 2.0, "tokens": 900.0, "seconds": 3.5},
        environment={"begun": 6.0, "ended": 5.0, "cancelled": 0.0, "open": 1.0, "waiting": 0.0, "turns": 11.0, "seconds": 2.5},
    ),
    lease_ids=(1, 2, 3),
    seen_lease_id=3,
    reward_trouble=RewardTrouble(waiting_s=8.0, problem="down", lease_ids=(1,)),
)


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def status(page: ActorPage, path: str) -> int:
    return page.routes()[path]().status


def values(heartbeat: ActorHeartbeat | None) -> dict[tuple[str, str], float]:
    text = numbers(families(heartbeat, is_welcome=True, silence_s=0.25)).content.decode()
    samples = [sample for found in text_string_to_metric_families(text) for sample in found.samples]
    return {(sample.name, ",".join(sample.labels.values())): sample.value for sample in samples}


def test_every_number_of_the_table_is_exported_with_its_label_and_value() -> None:
    found = values(HEARTBEAT)
    assert {name for name, _ in found} == {one.name for one in EXPORTED}
    assert found["offbeat_actor_welcomed", ""] == 1
    assert found["offbeat_actor_silence_seconds", ""] == 0.25
    assert found["offbeat_actor_policy_version", ""] == 3
    assert found["offbeat_actor_generated_tokens_total", ""] == 500
    assert found["offbeat_actor_groups_total", ""] == 4
    assert found["offbeat_actor_running_completions", ""] == 2
    assert found["offbeat_actor_held_leases", ""] == 3
    assert found["offbeat_actor_loop_seconds_total", "generate"] == 1.5
    assert found["offbeat_actor_reward_trouble_seconds", ""] == 8
    assert found["offbeat_actor_judge_requests_total", "cached"] == 2
    assert found["offbeat_actor_judge_seconds_total", ""] == 3.5
    assert found["offbeat_actor_open_episodes", "open"] == 1
    assert found["offbeat_actor_episodes_total", "begun"] == 6
    assert found["offbeat_actor_turns_total", ""] == 11
    assert found["offbeat_actor_environment_seconds_total", ""] == 2.5


def test_numbers_of_what_a_run_does_not_have_are_absent() -> None:
    plain = ActorHeartbeat(policy_version=-1, stats=ActorStats(), lease_ids=(), seen_lease_id=-1)
    names = {name for name, _ in values(plain)}
    assert not [name for name in names if "judge" in name or "episode" in name or "turns" in name]
    assert values(plain)["offbeat_actor_reward_trouble_seconds", ""] == 0
    assert {name for name, _ in values(None)} == {"offbeat_actor_welcomed", "offbeat_actor_silence_seconds"}


def test_loop_that_hangs_is_ill_and_one_that_loads_weights_is_not() -> None:
    clock = Clock()
    page = ActorPage(clock)
    assert status(page, "/healthz") == 200
    clock.now += TURNED_WITHIN_S
    assert status(page, "/healthz") == 200
    clock.now += 1
    assert status(page, "/healthz") == 503
    page.turn(is_welcome=False, has_weights=False)
    assert status(page, "/healthz") == 200
    page.be_busy(60.0)
    clock.now += 59
    assert status(page, "/healthz") == 200
    clock.now += 1
    assert status(page, "/healthz") == 503
    page.be_busy(60.0)
    page.turn(is_welcome=False, has_weights=False)
    clock.now += TURNED_WITHIN_S + 1
    assert status(page, "/healthz") == 503


@pytest.mark.parametrize(("is_welcome", "has_weights", "expected"), [(False, True, 503), (True, False, 503), (True, True, 200)])
def test_actor_is_ready_once_it_is_welcomed_and_has_weights(is_welcome: bool, has_weights: bool, expected: int) -> None:
    page = ActorPage(Clock())
    assert status(page, "/readyz") == 503
    page.turn(is_welcome=is_welcome, has_weights=has_weights)
    assert status(page, "/readyz") == expected


def is_ready(actor: Actor) -> bool:
    return status(actor.page, "/readyz") == 200


def test_actor_whose_learner_is_gone_is_healthy_and_not_ready(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.3) as actor:
        assert not is_ready(actor)
        learner.welcome()
        eventually(lambda: is_ready(actor), learner)
        learner.wait_heartbeat(lambda heartbeat: heartbeat.policy_version == 0)
        assert b"offbeat_actor_policy_version 0.0" in actor.page.routes()["/metrics"]().content
        # Nobody answers its heartbeats from here on.
        deadline = time.monotonic() + PATIENCE_S
        while is_ready(actor) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_ready(actor)
        assert status(actor.page, "/healthz") == 200


def test_actor_is_healthy_while_turns_on_its_gpu_change(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.common.records.exported.TURNED_WITHIN_S", 0.0)
    actors: list[Actor] = []
    seen: list[int] = []

    def look() -> bool:
        seen.extend(status(actor.page, "/healthz") for actor in actors)
        return True

    with actor_of(learner, gpu=look) as actor:
        actors.append(actor)
        learner.welcome()
        eventually(lambda: bool(seen), learner)
    assert set(seen) == {200}


def test_actor_without_weights_is_not_ready(learner: Learner) -> None:
    with actor_of(learner, policy_version=None) as actor:
        learner.welcome()
        eventually(lambda: b"there are no weights yet" in actor.page.routes()["/readyz"]().content, learner)
        assert not is_ready(actor)


def test_actors_on_one_machine_get_ports_of_their_own_that_the_log_tells(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    page = ActorPage(Clock())
    with serving(page, "127.0.0.1:0"), serving(page, "127.0.0.1:0"), serving(page, ""):
        first, second = re.findall(r"numbers and probes: (http://127\.0\.0\.1:\d+/metrics)", caplog.text)
        assert first != second
        with urllib.request.urlopen(first) as answer:
            assert b"offbeat_actor_welcomed 0.0" in answer.read()
        bind = first.split("/")[2]
        with pytest.raises(SettingError, match=rf'metrics\.actor_bind = "{bind}".*Address already in use'), serving(page, bind):
            pass
