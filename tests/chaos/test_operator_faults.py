"""Chaos changes settings as an operator does: the run goes on, or ends where every engine differs from the learner for long."""

from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import resolved_toml
from offbeat.deploy.operating import link as questions
from offbeat.learner.dispatch.canary import Canary
from offbeat.learner.dispatch.quarantine import MAX_MISMATCHES
from offbeat.learner.dispatch.run_state import RunFailedError
from offbeat.protocols.messages import LiveSettingsReport, LiveSettingsRequest
from tests.chaos.changes import IMPOSSIBLE
from tests.chaos.faults import Attempt, Scene, commit
from tests.chaos.schedule import Fault
from tests.deploy.operating.operator_desk import Desk as OperatorDesk
from tests.deploy.services import free_port
from tests.learner.dispatch.dispatch_desk import Actor, Desk

DOUBT = Fault("doubt learner", "learner", at_step=1, delay_s=0.0, duration_s=0.2, seed=1)
SCALE = Fault("scale", "learner", at_step=1, delay_s=0.0, duration_s=0.2, seed=1)


class Pauses:
    """A round that only notes its pauses."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def find(self, target: str) -> int:
        raise AssertionError(f"{target} is no victim of this fault")

    def pause(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def try_learner(self, *settings: str) -> Attempt:
        raise AssertionError("this fault tries no learner")


def make_scene(run: Path, address: str, hub: Any, pauses: Pauses) -> Scene:
    """Return the scene of a run whose learner is at this address."""
    config = Config(hub=msgspec.structs.replace(hub, address=address))
    run.mkdir()
    (run / "config.toml").write_text(resolved_toml(config))
    return Scene(pauses, cast(Any, None), cast(Any, None), None, None, run, Path(), 0)


def test_tolerance_is_impossible_for_a_while_and_then_as_before(tmp_path: Path) -> None:
    desk, pauses = OperatorDesk(tmp_path / "keys", LiveSettingsReport(policy_version=3)), Pauses()
    try:
        scene = make_scene(tmp_path / "run", desk.address, desk.hub_section, pauses)
        assert commit(DOUBT, scene).detail == "no engine could match the learner for 0.2 s"
    finally:
        desk.close()
    assert pauses.seconds == [0.2]
    assert [asked.settings for asked in desk.asked if isinstance(asked, LiveSettingsRequest)] == [
        {"weights.canary_tolerance": IMPOSSIBLE},
        {"weights.canary_tolerance": "none"},
    ]


def test_run_wants_an_actor_more_for_a_while(tmp_path: Path) -> None:
    desk, pauses = OperatorDesk(tmp_path / "keys", LiveSettingsReport(policy_version=3)), Pauses()
    try:
        scene = make_scene(tmp_path / "run", desk.address, desk.hub_section, pauses)
        wanted = Config().launch.num_actors
        assert commit(SCALE, scene).detail == f"{wanted + 1} actors instead of {wanted} for 0.2 s"
    finally:
        desk.close()
    assert pauses.seconds == [0.2]
    assert [asked.settings for asked in desk.asked if isinstance(asked, LiveSettingsRequest)] == [
        {"scale.actors": str(wanted + 1)},
        {"scale.actors": str(wanted)},
    ]


@pytest.mark.parametrize("fault", [DOUBT, SCALE], ids=lambda fault: fault.kind)
def test_learner_that_does_not_answer_is_left_as_it_is(fault: Fault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(questions, "ANSWER_S", 0.1)
    pauses = Pauses()
    scene = make_scene(tmp_path / "run", f"tcp://127.0.0.1:{free_port()}", Config().hub, pauses)
    assert commit(fault, scene).detail is None
    assert pauses.seconds == []


class Doubted:
    """A dispatcher with two engines that differ from the learner by the rounding of float32, and the canary that judges."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.actors = [Actor(self.desk, name).join(capacity=2) for name in ("a", "b")]
        settings = self.desk.settings
        self.canary = Canary(
            np.array([1, 2, 2, 1], np.int32),
            dtype="float32",
            file_logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
            tolerance=lambda: settings.config.weights.canary_tolerance,
            record=self.desk.rows.append,
        )
        self.canary.add(0, np.array([-1.0, -2.0, -3.0], np.float32))

    def compare(self) -> None:
        for actor in self.actors:
            verdict = self.canary.judge(actor.name, 0, np.array([-1.0, -2.000001, -3.0], np.float32))
            assert verdict is not None
            actor.commit(0)
            self.desk.dispatcher.judge_canary(actor.name, 0, verdict.flaw, verdict.agrees_with)


def test_run_goes_on_when_the_learner_is_right_again_in_time() -> None:
    doubted = Doubted()
    assert doubted.desk.tune(weights__canary_tolerance=IMPOSSIBLE).error == ""
    for _ in range(MAX_MISMATCHES - 1):
        doubted.compare()
    assert doubted.actors[0].leases() == []
    assert doubted.desk.tune(weights__canary_tolerance="none").error == ""
    doubted.compare()
    assert len(doubted.actors[0].leases()) == 2
    assert doubted.desk.batch() is None, "no error: the run waits for rollouts"


def test_run_whose_learner_stays_wrong_ends_by_itself_with_the_reason() -> None:
    doubted = Doubted()
    doubted.desk.tune(weights__canary_tolerance=IMPOSSIBLE)
    for _ in range(MAX_MISMATCHES):
        doubted.compare()
    with pytest.raises(RunFailedError, match=r"a, b agree with each other|b, a agree with each other"):
        doubted.desk.batch()
