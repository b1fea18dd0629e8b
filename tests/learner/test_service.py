"""The training loop and the service around it, with hand-written collaborators and a clock that only they move."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest
import torch.distributed as dist

from offbeat.common.errors import LostProcessError
from offbeat.common.processes.gpu_turn import LearnerTurn
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.rows import EvalRow, LedgerSums, Recorder, Row, row_fields
from offbeat.common.settings.config import Config, DataSection, ModelSection, RolloutSection, RunSection, WeightsSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.learner import service
from offbeat.learner.diagnostics.own_evaluation import EvaluatedCompletion, EvaluationNumbers
from offbeat.learner.diagnostics.routing_metrics import RoutingComparison
from offbeat.learner.dispatch.canary import Canary
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.run_state import RunFailedError
from offbeat.learner.dispatch.status import FleetUse
from offbeat.learner.hub import ActorLink, HubThread
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.learner.reporting.step_rows import StepRows
from offbeat.learner.restart.resume import Checkpoints
from offbeat.learner.service import WAIT_S, Learner, TrainingLoop
from offbeat.learner.training.ranks import RankedTrainer
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.learner.weights.publisher import WeightPublisher

TRAIN_S, SNAPSHOT_S, PUBLISH_WAIT_S, CHECKPOINT_S = 8.0, 2.0, 1.0, 4.0
"""Seconds that the fakes take."""


class Clock:
    """Stands in for the `time` module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(service, "time", clock)
    return clock


class Score(NamedTuple):
    logprobs: Any
    routing: None


class FakeTrainer:
    """Makes `num_steps` steps of each batch."""

    def __init__(self, clock: Clock, calls: list[str], num_steps: int) -> None:
        self.policy_version = 0
        self._clock, self._calls, self._num_steps = clock, calls, num_steps
        self.failure: BaseException | None = None

    def train_batch(self, groups: list[Group]) -> list[dict[str, Any]]:
        assert isinstance(groups, list)
        if self.failure:
            raise self.failure
        self._clock.now += TRAIN_S
        self.policy_version += self._num_steps
        self._calls.append(f"train to {self.policy_version}")
        return [{} for _ in range(self._num_steps)]

    def snapshot(self, buffer: object) -> None:
        self._clock.now += SNAPSHOT_S
        self._calls.append(f"snapshot {self.policy_version}")

    def score(self, token_ids: list[int]) -> Score:
        assert token_ids == [5, 6]
        return Score(np.array([-float(self.policy_version)], np.float32), None)

    def tune(self, **settings: Any) -> None:
        self._calls.append(f"tune {settings}")

    def idle(self) -> None:
        self._calls.append("idle")

    def save_model(self, folder: Path) -> None:
        self._calls.append(f"save {folder}")

    def close(self) -> None:
        self._calls.append("close trainer")


class FakeDispatcher:
    """Has a batch after each of `waits` seconds, a whole number of `WAIT_S`; then none any more."""

    def __init__(self, clock: Clock, calls: list[str], config: Config, waits: list[float], stop: StopRequest) -> None:
        self._clock, self._calls, self._config, self._waits, self._stop = clock, calls, config, waits, stop
        self.is_over = False
        self.num_evaluation_waits = 0
        """Waits until the last evaluation is finished."""
        self.answers_stop_after = 0
        """Number of those waits in each of which held-out prompts are answered; none are in later ones."""
        self.activities: list[str] = []
        """The activities that operators saw."""
        self.counted = LedgerSums(3, 3, {}, 0, 0)
        self.signal_at = float("inf")
        """Time at which the run is asked to stop."""
        self.leave = True
        self.failure: BaseException | None = None
        """The error that ended the hub's thread during the last evaluation."""

    def doing(self, activity: str) -> None:
        self.activities.append(activity)

    def settings(self) -> Config:
        return self._config

    def members(self) -> list[tuple[bytes, str, int | None]]:
        return [(b"a/1", "a", 0)]

    def take_batch(self, timeout_s: float) -> list[Any] | None:
        if self._clock.now >= self.signal_at:
            self._stop._on_signal(15, None)
        if self._waits and self._waits[0] <= 0:
            self._waits.pop(0)
            return ["group"]
        self._clock.now += timeout_s
        if self._waits:
            self._waits[0] -= timeout_s
        return None

    def finish_batch(self, groups: list[Any], policy_version: int) -> None:
        self._calls.append(f"finish {policy_version}")

    def publish(self, policy_version: int, *, last: bool = False) -> None:
        self._calls.append(f"announce {policy_version}{' last' if last else ''}")

    def is_log_over(self) -> bool:
        return self.is_over

    def take_fleet_use(self) -> FleetUse:
        return FleetUse(0.5, num_actors=1, num_new=0, slots=4.0, spare=0.25, waits=0.0, is_troubled=False)

    def wait_evaluations(self, timeout_s: float) -> bool:
        if not self.num_evaluation_waits:
            return True
        if self._clock.now >= self.signal_at:
            self._stop._on_signal(15, None)
        self.num_evaluation_waits -= 1
        self.answers_stop_after -= 1
        self._clock.now += timeout_s
        return False

    def num_evaluation_answers(self) -> int:
        return -max(0, self.answers_stop_after)

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    def waiting_for(self) -> str:
        return "nothing"

    def begin(self) -> None:
        self._calls.append("begin")

    def stop(self, reason: str) -> None:
        self._calls.append(f"stop: {reason}")

    def wait_left(self, timeout_s: float) -> bool:
        self._calls.append(f"wait {timeout_s:g} s for actors to leave")
        return self.leave

    def counts(self) -> LedgerSums:
        return self.counted


class FakePublisher:
    """A publisher that takes `PUBLISH_WAIT_S` to free a buffer."""

    def __init__(self, clock: Clock, calls: list[str], canary: Canary) -> None:
        self._clock, self._calls, self._canary = clock, calls, canary

    def start(self, actors: ActorLink) -> None:
        assert actors.recipients() == [Recipient(b"a/1", "a", 0)]
        self._calls.append("start publisher")

    @contextmanager
    def writing(self) -> Iterator[object]:
        self._clock.now += PUBLISH_WAIT_S
        yield "buffer"

    def publish(self, policy_version: int) -> None:
        # Actors may answer from now on.
        assert policy_version in self._canary._logprobs
        assert self._calls[-1].startswith(f"announce {policy_version}"), "their dispatcher takes them for liars"
        self._calls.append(f"publish {policy_version}")

    def wait_until_taken(self, stop: StopRequest) -> None:
        self._calls.append("taken by all")

    def close(self) -> None:
        self._calls.append("close publisher")


class FakeTurn:
    def __init__(self, calls: list[str], signal_in_turn: int = 0) -> None:
        self._calls, self._signal_in_turn = calls, signal_in_turn

    @contextmanager
    def taken(self, stop: StopRequest) -> Iterator[bool]:
        self._calls.append("gpu")
        if self._calls.count("gpu") == self._signal_in_turn:
            stop.ask("SIGINT")
        yield not stop
        self._calls.append("gpu is free")


class FakeCheckpoints:
    def __init__(self, clock: Clock, calls: list[str], trainer: FakeTrainer, newest: int | None) -> None:
        self._clock, self._calls, self._trainer, self._newest = clock, calls, trainer, newest

    def newest_version(self) -> int | None:
        return self._newest

    def fits(self, seconds: float) -> bool:
        return seconds >= CHECKPOINT_S

    def save(self) -> bool:
        self._clock.now += CHECKPOINT_S
        self._calls.append(f"checkpoint {self._trainer.policy_version}")
        return True


class FakeStepRows:
    """Step rows that record the number of steps, the version before them and the seconds of each batch."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, int, dict[str, float]]] = []

    def record(self, steps: list[Any], groups: list[Any], first_version: int, seconds: dict[str, float], _: FleetUse) -> None:
        self.recorded.append((len(steps), first_version, seconds))


class FakeHubThread:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def start(self) -> None:
        self._calls.append("start hub")

    def wake(self) -> None:
        self._calls.append("wake")

    def close(self) -> None:
        self._calls.append("close hub")


class FakeLog:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def close(self) -> None:
        self._calls.append("close log")


class Bench:
    """A learner made of fakes."""

    def __init__(
        self,
        *,
        num_steps: int = 2,
        steps_per_batch: int = 1,
        publish_interval: int = 1,
        checkpoint_interval: int = 0,
        waits: list[float] | None = None,
        make_numbers: Callable[[Recorder], EvaluationNumbers] | None = None,
        grace_s: float | None = None,
        newest_checkpoint: int | None = None,
    ) -> None:
        self.clock, self.calls, self.stop = cast(Clock, service.time), list[str](), StopRequest()
        self.config = Config(
            model=ModelSection(path="model"),
            data=DataSection(train_data="data.jsonl"),
            run=RunSection(dir="run", grace_s=grace_s),
            rollout=RolloutSection(lease_timeout_s=10.0),
            weights=WeightsSection(interval=publish_interval),
            train=TrainSection(num_steps=num_steps, checkpoint_interval=checkpoint_interval),
        )
        waits = waits if waits is not None else [0.0] * num_steps
        self.trainer = FakeTrainer(self.clock, self.calls, steps_per_batch)
        self.dispatcher = FakeDispatcher(self.clock, self.calls, self.config, waits, self.stop)
        self.step_rows = FakeStepRows()
        self.rows: list[dict[str, Any]] = []
        canary = Canary(
            np.array([5, 6], np.int32),
            dtype="float32",
            file_logprobs=np.zeros(1, np.float32),
            tolerance=lambda: None,
            record=self.record,
        )
        publisher = cast(WeightPublisher, FakePublisher(self.clock, self.calls, canary))
        self.loop = TrainingLoop(
            self.config,
            trainer=cast(RankedTrainer, self.trainer),
            dispatcher=cast(Dispatcher, self.dispatcher),
            publisher=publisher,
            canary=canary,
            routing=RoutingComparison(0, 1, lambda row: None),
            checkpoints=cast(Checkpoints, FakeCheckpoints(self.clock, self.calls, self.trainer, newest_checkpoint)),
            step_rows=cast(StepRows, self.step_rows),
            wake_hub=lambda: None,
        )
        self.learner = Learner(
            self.loop,
            link=ActorLink(cast(Dispatcher, self.dispatcher), cast(HubThread, FakeHubThread(self.calls)), dead_after_s=6.0),
            publisher=publisher,
            log=cast(RolloutLog, FakeLog(self.calls)),
            record=self.record,
            started=self.clock.now - 100.0,
            evaluation_numbers=make_numbers and make_numbers(self.record),
        )

    def record(self, row: Row) -> None:
        self.rows.append(row_fields(row))

    def calls_of(self, verb: str) -> list[str]:
        return [call.removeprefix(f"{verb} ") for call in self.calls if call.startswith(f"{verb} ")]


def test_weights_are_published_before_the_first_wait_and_after_each_step() -> None:
    bench = Bench(num_steps=2)
    assert bench.loop.run(bench.stop) == "finished"
    assert bench.calls == [
        *("snapshot 0", "announce 0", "publish 0"),
        *("train to 1", "finish 1", "snapshot 1", "announce 1", "publish 1"),
        *("train to 2", "finish 2", "snapshot 2", "announce 2 last", "publish 2"),
        "save run/model",
    ]


def test_learner_that_shares_a_gpu_in_turns_has_it_for_training_alone_when_all_have_the_weights() -> None:
    bench = Bench(num_steps=1)
    bench.loop.gpu_turn = cast(LearnerTurn, FakeTurn(bench.calls))
    assert bench.loop.run(bench.stop) == "finished"
    assert bench.calls[3:8] == ["taken by all", "gpu", "train to 1", "gpu is free", "finish 1"]
    assert bench.dispatcher.activities[2:4] == ["training step 1", "waiting for the actors to give up the GPU"]


def test_learner_that_is_asked_to_stop_while_actors_have_its_gpu_trains_no_further() -> None:
    bench = Bench(num_steps=2, checkpoint_interval=9)
    bench.loop.gpu_turn = cast(LearnerTurn, FakeTurn(bench.calls, signal_in_turn=2))
    assert bench.loop.run(bench.stop) == "stopped"
    assert bench.calls_of("train") == ["to 1"]
    assert bench.calls_of("checkpoint") == ["1"]


def test_operators_see_what_the_learner_is_doing() -> None:
    bench = Bench(num_steps=1)
    bench.loop.run(bench.stop)
    assert bench.dispatcher.activities == [
        "publishing weights 0",
        *("waiting for rollouts", "training step 1", "publishing weights 1"),
        *("waiting for the last evaluation", "writing the model"),
    ]


def test_weights_are_published_once_per_interval_and_at_the_end() -> None:
    bench = Bench(num_steps=5, publish_interval=2)
    bench.loop.run(bench.stop)
    assert bench.calls_of("announce") == ["0", "2", "4", "5 last"]


def test_batch_that_steps_over_several_intervals_is_published_once() -> None:
    bench = Bench(num_steps=9, steps_per_batch=3, publish_interval=2, waits=[0.0] * 3)
    bench.loop.run(bench.stop)
    assert bench.calls_of("announce") == ["0", "3", "6", "9 last"]
    bench = Bench(num_steps=9, steps_per_batch=3, publish_interval=6, waits=[0.0] * 3)
    bench.loop.run(bench.stop)
    assert bench.calls_of("announce") == ["0", "6", "9 last"]


@pytest.mark.parametrize(("interval", "saved"), [(0, []), (1, ["2", "4", "6"]), (3, ["4", "6"]), (4, ["4", "6"])])
def test_checkpoint_is_written_at_multiples_of_the_interval_and_at_the_end(interval: int, saved: list[str]) -> None:
    bench = Bench(num_steps=6, steps_per_batch=2, checkpoint_interval=interval, waits=[0.0] * 3)
    bench.loop.run(bench.stop)
    assert bench.calls_of("checkpoint") == saved


def test_log_that_has_outgrown_its_setting_has_a_checkpoint_written_and_the_setting_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(num_steps=2, checkpoint_interval=2)
    bench.dispatcher.is_over = True
    bench.loop.run(bench.stop)
    assert bench.calls_of("checkpoint") == ["1", "2"]
    assert [record.message for record in caplog.records if "log.retain_mb" in record.message] == [ANY], "the second was due"


@pytest.mark.parametrize(("interval", "saved"), [(0, []), (100, ["1"])])
def test_run_that_is_asked_to_stop_saves_a_checkpoint_and_the_model(interval: int, saved: list[str]) -> None:
    bench = Bench(num_steps=3, checkpoint_interval=interval, waits=[0.0])
    bench.dispatcher.signal_at = bench.clock.now + 30.0
    assert bench.loop.run(bench.stop) == "stopped"
    assert bench.calls_of("checkpoint") == saved
    assert len(bench.calls_of("save")) == 1


@pytest.mark.parametrize(("waits", "saved"), [([], []), ([0.0], ["1"])])
def test_checkpoint_that_a_run_resumed_from_is_not_written_again(waits: list[float], saved: list[str]) -> None:
    bench = Bench(num_steps=3, checkpoint_interval=100, waits=waits, newest_checkpoint=0)
    bench.dispatcher.signal_at = bench.clock.now + 30.0
    assert bench.loop.run(bench.stop) == "stopped"
    assert bench.calls_of("checkpoint") == saved


def test_run_that_is_asked_to_stop_before_its_first_step_leaves_no_model() -> None:
    bench = Bench(num_steps=3, waits=[])
    bench.dispatcher.signal_at = bench.clock.now + 30.0
    assert bench.loop.run(bench.stop) == "stopped"
    assert bench.calls_of("save") == []


@pytest.mark.parametrize(
    ("reason", "grace_s", "interval", "saved", "outcome"),
    [
        ("SIGTERM", CHECKPOINT_S + 10.0, 100, ["1"], "paused"),
        ("SIGTERM", CHECKPOINT_S + 9.9, 100, [], "paused"),
        ("SIGINT", 1.0, 100, ["1"], "stopped"),
    ],
)
def test_run_whose_machine_is_taken_away_saves_what_fits_and_leaves_its_actors_waiting(
    reason: str, grace_s: float, interval: int, saved: list[str], outcome: str
) -> None:
    bench = Bench(num_steps=3, checkpoint_interval=interval, waits=[0.0], grace_s=grace_s)
    bench.stop.reason, bench.stop.asked_at = reason, bench.clock.now + TRAIN_S + 2 * (PUBLISH_WAIT_S + SNAPSHOT_S) - 10.0
    bench.dispatcher.signal_at = bench.clock.now
    assert bench.learner.run(bench.stop) == outcome
    assert bench.calls_of("checkpoint") == saved
    assert bench.calls_of("save") == ([] if outcome == "paused" else ["run/model"])
    told = ENDING[:1] + ENDING[4:] if outcome == "paused" else ending(f"stopped {reason}")
    assert bench.calls[-len(told) :] == told
    assert (bench.rows[-1]["outcome"], bench.rows[-1]["detail"]) == (outcome, reason)


def test_other_ranks_hear_of_the_learner_while_it_waits() -> None:
    bench = Bench(num_steps=1, waits=[3 * WAIT_S])
    bench.loop.run(bench.stop)
    assert bench.calls.count("idle") == 3


def test_times_of_a_batch_are_told_apart() -> None:
    bench = Bench(num_steps=4, steps_per_batch=2, checkpoint_interval=4, publish_interval=4, waits=[3.0, 5.0])
    bench.loop.run(bench.stop)
    no_publish = {"time/publish_wait_s": 0.0, "time/snapshot_s": 0.0, "time/held_back_s": 0.5}
    publish = {"time/publish_wait_s": PUBLISH_WAIT_S, "time/snapshot_s": SNAPSHOT_S, "time/held_back_s": 0.5}
    assert bench.step_rows.recorded == [
        (2, 0, {"time/step_s": 3.0 + TRAIN_S, "time/wait_rollouts_s": 3.0, **no_publish}),
        (2, 2, {"time/step_s": 5.0 + 8.0 + 1.0 + 2.0 + CHECKPOINT_S, "time/wait_rollouts_s": 5.0, **publish}),
    ]


def test_trainer_is_tuned_once_when_its_settings_change() -> None:
    bench = Bench(num_steps=4)
    config = bench.config
    loss = msgspec.structs.replace(config.loss, clip_low=0.1, clip_high=0.2)
    changed = msgspec.structs.replace(config, loss=loss, train=msgspec.structs.replace(config.train, learning_rate=0.5))
    settings = iter([config, changed, changed, msgspec.structs.replace(changed, rollout=RolloutSection(group_size=2))])
    bench.dispatcher.settings = lambda: next(settings)
    bench.loop.run(bench.stop)
    assert bench.calls_of("tune") == ["{'clip_low': 0.1, 'clip_high': 0.2, 'learning_rate': 0.5}"]
    assert bench.calls.index("train to 1") < bench.calls.index("tune " + bench.calls_of("tune")[0])


def test_run_resumed_after_its_last_step_evaluates_the_last_version() -> None:
    bench = Bench(num_steps=2)
    bench.trainer.policy_version = 2
    assert bench.loop.run(bench.stop) == "finished"
    assert bench.calls == ["snapshot 2", "announce 2 last", "publish 2", "save run/model"]


def test_model_is_written_after_the_last_evaluation() -> None:
    bench = Bench(num_steps=1)
    bench.dispatcher.num_evaluation_waits = 5
    assert bench.loop.run(bench.stop) == "finished"
    assert bench.dispatcher.num_evaluation_waits == 0
    assert bench.calls[-6:] == ["idle"] * 5 + ["save run/model"]


def test_run_whose_hub_dies_during_the_last_evaluation_keeps_what_was_trained_and_fails() -> None:
    bench = Bench(num_steps=1, checkpoint_interval=5)
    bench.dispatcher.failure = OSError("the hub's socket broke")
    with pytest.raises(OSError, match="socket broke"):
        bench.learner.run(bench.stop)
    assert bench.calls[-9:-7] == ["save run/model", "checkpoint 1"]
    assert (bench.rows[-1]["outcome"], bench.rows[-1]["detail"]) == ("failed", "OSError: the hub's socket broke")


@pytest.mark.parametrize(("signal_after_s", "waits"), [(3.0, 4), (1e9, 11)])
def test_last_evaluation_is_given_up_on_a_signal_and_after_a_leases_time(signal_after_s: float, waits: int) -> None:
    bench = Bench(num_steps=1)
    bench.dispatcher.num_evaluation_waits = 1000
    bench.dispatcher.signal_at = bench.clock.now + 2 * (PUBLISH_WAIT_S + SNAPSHOT_S) + TRAIN_S + signal_after_s
    assert bench.loop.run(bench.stop) == "finished"
    assert 1000 - bench.dispatcher.num_evaluation_waits == waits
    assert bench.calls[-1] == "save run/model"


@pytest.mark.parametrize(("interval", "outcome", "saved"), [(100, "paused", []), (0, "finished", ["run/model"])])
def test_run_whose_machine_is_taken_away_during_the_last_evaluation_is_paused_if_it_can_go_on(
    interval: int, outcome: str, saved: list[str]
) -> None:
    bench = Bench(num_steps=1, checkpoint_interval=interval, grace_s=CHECKPOINT_S + 100.0)
    bench.dispatcher.num_evaluation_waits = 1000
    bench.dispatcher.signal_at = bench.clock.now + 2 * (PUBLISH_WAIT_S + SNAPSHOT_S) + TRAIN_S + 3.0
    assert bench.learner.run(bench.stop) == outcome
    assert bench.calls_of("checkpoint") == (["1"] if outcome == "paused" else [])
    assert bench.calls_of("save") == saved


def test_last_evaluation_has_a_leases_time_after_each_answer() -> None:
    bench = Bench(num_steps=1)
    bench.dispatcher.num_evaluation_waits, bench.dispatcher.answers_stop_after = 1000, 300
    assert bench.loop.run(bench.stop) == "finished"
    assert 1000 - bench.dispatcher.num_evaluation_waits == 300 + 11


ENDING = ["close publisher", "stop: {}", "wake", "wait 7 s for actors to leave", "close hub", "close log", "close trainer"]


def ending(reason: str) -> list[str]:
    return [call.format(reason) for call in ENDING]


def test_service_starts_its_threads_before_the_loop_and_ends_them_after_it() -> None:
    bench = Bench(num_steps=1)
    assert bench.learner.run(bench.stop) == "finished"
    assert bench.calls[:4] == ["begin", "start hub", "start publisher", "snapshot 0"]
    assert bench.calls[-7:] == ending("finished")
    started, final = bench.rows
    assert (started["kind"], started["event"]) == ("event", "run_started")
    assert "torch" in started["detail"]
    assert final == {
        "kind": "final",
        "policy_version": 1,
        "wall_s": 100.0 + 2 * (PUBLISH_WAIT_S + SNAPSHOT_S) + TRAIN_S,
        "ledger": {"leased": 3, "trained": 3, "dropped": {}, "expired": 0, "in_flight": 0},
        "outcome": "finished",
        "detail": "",
    }


def test_evaluation_whose_numbers_are_late_is_recorded_before_the_final_row() -> None:
    is_called = threading.Event()

    def late(completions: Sequence[EvaluatedCompletion]) -> dict[str, float]:
        is_called.set()
        threading.Event().wait(0.2)
        return {"late": 1.0}

    numbers: list[EvaluationNumbers] = []

    def make_numbers(record: Recorder) -> EvaluationNumbers:
        numbers.append(EvaluationNumbers(late, [], str, record))
        return numbers[0]

    bench = Bench(num_steps=1, make_numbers=make_numbers)
    numbers[0].finish(EvalRow(policy_version=1, reward=0.5, length=1.0, num_completions=0, num_failed=0), {})
    assert is_called.wait(60.0)
    bench.learner.run(bench.stop)
    assert [row["kind"] for row in bench.rows] == ["event", "eval", "final"]
    assert bench.rows[1]["numbers"] == {"late": 1.0}


def test_service_that_is_stopped_tells_by_which_signal() -> None:
    bench = Bench(num_steps=1, waits=[])
    bench.dispatcher.signal_at = bench.clock.now
    bench.dispatcher.leave = False
    assert bench.learner.run(bench.stop) == "stopped"
    assert bench.calls[-7:] == ending("stopped SIGTERM")
    assert (bench.rows[-1]["outcome"], bench.rows[-1]["detail"]) == ("stopped", "SIGTERM")


@pytest.mark.parametrize(
    ("error", "detail"), [(RunFailedError("no actor"), "no actor"), (ValueError("a bug"), "ValueError: a bug")]
)
def test_service_that_fails_tells_everyone_and_raises(error: Exception, detail: str) -> None:
    bench = Bench(num_steps=1)
    bench.trainer.failure = error
    with pytest.raises(type(error), match=str(error)):
        bench.learner.run(bench.stop)
    assert bench.calls[-7:] == ending(f"failed {detail}")
    assert (bench.rows[-1]["outcome"], bench.rows[-1]["detail"]) == ("failed", detail)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:7. This is typically"), "[::1]:7"),
        (dist.DistBackendError("NCCL error: remote process exited\nLast error:"), "remote process exited"),
    ],
)
def test_loss_of_another_rank_is_the_end_of_the_run_in_one_sentence(error: Exception, cause: str) -> None:
    bench = Bench(num_steps=1)
    bench.trainer.failure = error
    with pytest.raises(LostProcessError, match=r"^another process of the learner was lost \(.*then start all processes again"):
        bench.learner.run(bench.stop)
    detail = bench.rows[-1]["detail"]
    assert f"{cause})" in detail and "gloo" not in detail and "typically" not in detail


def test_ledger_that_does_not_add_up_is_an_error() -> None:
    bench = Bench(num_steps=1)
    bench.dispatcher.counted = LedgerSums(4, 3, {}, 0, 0)
    with pytest.raises(AssertionError, match="does not add up"):
        bench.learner.run(bench.stop)
