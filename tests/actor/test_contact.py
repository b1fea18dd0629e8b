"""Hello, welcome, heartbeats and silence, against a real hub."""

import contextlib
import time
from pathlib import Path
from typing import cast

import pytest

from offbeat.actor.contact import HeartbeatRepeater, LearnerContact, RefusedError
from offbeat.common.settings.config import Config, HubSection, RolloutSection, TaskSection
from offbeat.protocols.channels import Link
from offbeat.protocols.messages import Ack, ActorHeartbeat, ActorStats, Credit, GroupDone, Hello, Refused, SayHello
from tests.actor.actor_harness import CANARY, ENGINE, IDENTITY, LIMIT, PEER, Learner, actor_of

pytestmark = pytest.mark.slow


def test_hello_says_who_is_there_and_credit_follows_the_welcome(learner: Learner) -> None:
    with actor_of(learner, policy_version=None, max_inflight_groups=7):
        hello = learner.wait(Hello)
        assert (hello.actor, hello.incarnation, hello.engine) == ("actor-0", 1, ENGINE)
        assert (hello.temperature, hello.reward) == (RolloutSection().temperature, TaskSection().reward)
        assert (hello.run_id, hello.lease_ids) == ("", ())
        again = learner.wait(Hello)
        assert again == hello, "said again until it is answered"
        assert learner.welcome() == Credit(capacity=7)
        beat = learner.wait(ActorHeartbeat)
        assert (beat.policy_version, beat.lease_ids, beat.seen_lease_id) == (-1, (), -1)


def test_hello_has_the_hashes_of_the_code_that_rewards(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    (tmp_path / "mine.py").write_text("def digits(prompt, completion, row): ...")
    (tmp_path / "world.py").write_text("async def play(chat): ...")
    hub = HubSection(address=learner.hub.address)
    link = Link(hub.address, identity=PEER, max_message_bytes=LIMIT)
    with link:
        for task, names in (
            (TaskSection(reward="mine:digits"), ["mine.py"]),
            (TaskSection(environment="world:play"), ["world.py"]),
        ):
            contact = LearnerContact(link, IDENTITY, Config(hub=hub, task=task), ENGINE)
            while learner.hears_no(Hello, 0.02):
                contact.say_hello(())
            assert list(learner.wait(Hello).sources) == names


def test_wait_for_a_learner_is_told_within_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    times = [0.0]
    hub = HubSection(address="tcp://127.0.0.1:1")
    with Link(hub.address, identity=PEER, max_message_bytes=LIMIT) as link:
        contact = LearnerContact(link, IDENTITY, Config(hub=hub), ENGINE, clock=lambda: times[-1])
        for now in (0.0, 1.0, 3.0, 5.0, 20.0, 34.0):
            times.append(now)
            contact.say_hello(())
    waits = [text for text in caplog.messages if text.startswith("waiting for the learner at tcp://127.0.0.1:1")]
    assert [text.partition(", ")[2][:4] for text in waits] == ["3 s ", "34 s"]


def test_heartbeat_lists_what_is_held_and_the_newest_lease_it_knows_of(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        actor.engine.is_held = True
        learner.lease(4)
        learner.lease(6, min_policy_version=9)
        learner.wait_until_held(4, 6)
        learner.newest_lease_id = 6
        beat = learner.wait_heartbeat(lambda beat: beat.seen_lease_id == 6)
        assert sorted(beat.lease_ids) == [4, 6]
        actor.engine.is_held = False
        learner.wait(GroupDone)
        learner.forget()
        assert sorted(learner.wait(ActorHeartbeat).lease_ids) == [4, 6], "kept until it is acknowledged"
        learner.send(Ack(lease_id=4, outcome="accepted"))
        learner.wait_until_held(6)


def test_after_a_new_welcome_no_lease_counts_as_seen(learner: Learner) -> None:
    # A learner that took the actor for dead counts anew: the newest lease from before must not make later ones look lost.
    with actor_of(learner):
        learner.welcome()
        learner.newest_lease_id = 6
        learner.wait_heartbeat(lambda beat: beat.seen_lease_id == 6)
        learner.send(SayHello())
        learner.wait(Hello)
        learner.unread.clear()
        learner.send(learner.make_welcome(), CANARY)
        assert learner.wait(ActorHeartbeat).seen_lease_id == -1


def test_refusal_raises_with_the_reason(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.wait(Hello)
        learner.send(Refused(reason="another tokenizer"))
        with pytest.raises(RefusedError, match="another tokenizer"):
            actor.wait()


def test_silent_learner_is_greeted_again(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=1.5) as actor:
        learner.welcome()
        learner.unread.clear()
        # Nobody reads the hub meanwhile, so no heartbeat is answered.
        time.sleep(2.5)
        learner.welcome()
        learner.lease(1)
        assert learner.wait(GroupDone).lease_id == 1
        assert actor.thread.is_alive()


def test_learner_that_answers_heartbeats_is_not_greeted_again(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.4):
        learner.welcome()
        learner.forget()
        assert learner.hears_no(Hello, 1.0)


def test_actor_gives_up_when_no_learner_answers_in_time() -> None:
    learner = Learner()
    learner.hub.close()
    with actor_of(learner, connect_timeout_s=0.3) as actor, pytest.raises(RefusedError, match=r"actor\.connect_timeout_s"):
        actor.wait()


def test_actor_gives_up_a_missing_address_file_by_its_name(learner: Learner, tmp_path: Path) -> None:
    file = tmp_path / "hub.address"
    with (
        actor_of(learner, connect_timeout_s=0.3, address=f"file:{file}") as actor,
        pytest.raises(RefusedError, match=rf"actor\.connect_timeout_s.*the file {file} is missing"),
    ):
        actor.wait()


def test_actor_finds_a_learner_that_moved_where_the_address_file_says(learner: Learner, tmp_path: Path) -> None:
    file = tmp_path / "hub.address"
    with actor_of(learner, dead_after_s=0.5, address=f"file:{file}"):
        assert learner.hears_no(Hello, 0.1)
        file.write_text(f"{learner.hub.address}\n")
        learner.welcome()
        learner.lease(1)
        learner.wait(GroupDone)
        # The machine is gone: its connection neither answers nor breaks.
        moved = Learner()
        moved.incarnation = 2
        file.write_text(moved.hub.address)
        hello = moved.wait(Hello)
        assert (hello.run_id, hello.lease_ids) == ("r", (1,))
        moved.send(moved.make_welcome(), CANARY)
        assert moved.wait(GroupDone).lease_id == 1
        assert learner.hears_no(Hello, 0.1), "it does not look where the learner was"
        moved.send(SayHello())
        moved.wait(Hello)
        third = Learner()
        file.write_text(third.hub.address)
        assert third.wait(Hello).lease_ids == (1,), "it looks again while it says hello"
        moved.hub.close()
        third.hub.close()


def test_heartbeats_go_on_during_a_long_step_of_the_engine(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.8) as actor:
        learner.welcome()
        actor.engine.step_s = 2.0
        learner.lease(1)
        learner.wait_until_held(1)
        learner.forget()
        began = time.monotonic()
        num_heartbeats = 0
        while time.monotonic() < began + 1.5:
            num_heartbeats += 1
            assert learner.wait(ActorHeartbeat).lease_ids == (1,)
        assert num_heartbeats >= 4
        assert learner.wait(GroupDone).lease_id == 1
        # The learner was not silent: nobody listened.
        assert learner.hears_no(Hello, 0.5)


def test_actor_that_hangs_says_so_and_falls_silent(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[ActorHeartbeat] = []
    repeater = HeartbeatRepeater(lambda message: not sent.append(cast(ActorHeartbeat, message)), 0.02, time.monotonic)
    heartbeat = ActorHeartbeat(policy_version=0, stats=ActorStats(), lease_ids=(), seen_lease_id=-1)
    with contextlib.closing(repeater):
        with repeater.repeating(heartbeat, 0.2, "a step of the engine"):
            time.sleep(0.6)
            num_sent = len(sent)
            time.sleep(0.2)
            assert 1 <= num_sent == len(sent) <= 11
        with repeater.repeating(None, 0.2, "a step of the engine"):
            time.sleep(0.1)
        assert len(sent) == num_sent, "an actor that is not welcome has nothing to repeat"
    assert caplog.text.count("a step of the engine has not ended in time: this actor hangs") == 1
