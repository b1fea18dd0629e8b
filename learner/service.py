"""The learner: trains on what the actors sampled while they sample on, so that neither side waits for the other to finish.

actors -> HubThread -> Dispatcher -> TrainingLoop -> RankedTrainer -> WeightPublisher -> actors

| part | thread | takes | gives |
|---|---|---|---|
| `HubThread` and `Dispatcher` | the hub's | the actors' messages | leases to actors; batches of fresh enough groups |
| `TrainingLoop` | the main one | a batch | a snapshot of the weights, checkpoints, rows of metrics |
| `RankedTrainer` | the main one of every rank | a batch | optimizer steps |
| `WeightPublisher` | its own | a snapshot | weights to actors, during the next steps |
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from offbeat.common.errors import ServiceError
from offbeat.common.processes.gpu_turn import LearnerTurn
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.rows import EventRow, FinalRow, Recorder
from offbeat.common.records.run_folder import MODEL
from offbeat.common.settings.config import Config
from offbeat.learner.curriculum import Curriculum
from offbeat.learner.diagnostics.own_evaluation import EvaluationNumbers
from offbeat.learner.diagnostics.routing_metrics import RoutingComparison
from offbeat.learner.dispatch.canary import Canary
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.run_state import RunFailedError
from offbeat.learner.hub import ActorLink
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.learner.reporting.step_rows import StepRows
from offbeat.learner.restart.resume import Checkpoints
from offbeat.learner.restart.run_identity import software_versions
from offbeat.learner.training.checkpoints import CheckpointFailedError
from offbeat.learner.training.ranks import RankedTrainer, naming_lost_ranks
from offbeat.learner.weights.publisher import WeightPublisher

logger = logging.getLogger(__name__)

RunOutcome = Literal["finished", "stopped", "paused"]
"""`paused`: a learner will be started again for the run, and its actors wait for it."""

WAIT_S = 1.0
"""Longest wait for a batch before the loop looks at signals and deadlines again."""
LOG_WAITING_INTERVAL_S = 30.0


class Phases:
    """Times the phases of one batch and shows them to operators. A phase ends where the next one begins."""

    def __init__(self, show: Callable[[str], None]) -> None:
        """`show` takes the text that tells operators what the learner is doing."""
        self._show = show
        self._started = self._began = time.monotonic()
        self._phase = ""
        self._seconds: dict[str, float] = {}

    def begin(self, phase: str, activity: str = "") -> None:
        """Begin a phase; operators see `activity`, or still the one before where it is empty."""
        now = time.monotonic()
        self._seconds[self._phase] = self.seconds(self._phase) + now - self._began
        self._phase, self._began = phase, now
        if activity:
            self._show(activity)

    def seconds(self, phase: str) -> float:
        """Return how long a phase took that has ended; 0 without it."""
        return self._seconds.get(phase, 0.0)

    def total(self) -> float:
        """Return the seconds since the batch began."""
        return time.monotonic() - self._started


@dataclass(eq=False)
class TrainingLoop:
    """Takes batches from the dispatcher, trains on them and publishes the weights, until `train.num_steps` or a signal."""

    config: Config
    trainer: RankedTrainer
    dispatcher: Dispatcher
    publisher: WeightPublisher
    canary: Canary
    routing: RoutingComparison
    checkpoints: Checkpoints
    step_rows: StepRows
    wake_hub: Callable[[], None]
    """Lets the hub's thread see at once what the dispatcher has to send or grant."""
    gpu_turn: LearnerTurn | None = field(default_factory=LearnerTurn.of_process)
    """The learner's turns on a GPU that the actors use too; None: the learner has its memory for itself."""

    def __post_init__(self) -> None:
        # A resumed run's own: to replace it is to delete it first, and a learner killed in between would have lost it.
        self._checkpointed = self.checkpoints.newest_version()
        """Policy version of the newest checkpoint."""
        self._trained_with = (self.config.loss, self.config.train)
        """Settings that the trainer has; `_tune_trainer` updates them."""

    @property
    def _is_trained(self) -> bool:
        """True after the last step, and from the start when a run is resumed there."""
        return self.trainer.policy_version >= self.config.train.num_steps

    def run(self, stop: StopRequest) -> RunOutcome:
        """Train to the end, or until `stop`. Raises what ended the run early, or its last evaluation.

        Consumes: batches of groups. Waits for: the dispatcher, in `_wait_batch` and `_finish_evaluations`. Produces: published
        weights, checkpoints, rows, and the trained model.
        """
        # Published before any wait for data, because the actors need these weights to produce it.
        self._publish(Phases(self.dispatcher.doing))
        while not self._is_trained:
            phases = Phases(self.dispatcher.doing)
            phases.begin("wait_rollouts", "waiting for rollouts")
            groups = self._wait_batch(stop)
            if groups is None or not self._train(groups, phases, stop):
                return self._end_early(stop)
        self.dispatcher.doing("waiting for the last evaluation")
        if not self._finish_evaluations(stop) and self._left_of_grace_s(stop) is not None:
            outcome = self._end_early(stop)
            # The next learner makes the evaluation. Without these weights it could not, and the model is worth more.
            if self._checkpointed == self.trainer.policy_version:
                return outcome
        self._save_model()
        # After the model, which is worth more where the disk has room for one of them.
        if self.config.train.checkpoint_interval:
            self._save_checkpoint()
        # An error ends the wait for the last evaluation too. It must not cost the model.
        self.dispatcher.raise_if_failed()
        return "finished"

    def close(self) -> None:
        """End every rank's trainer."""
        self.trainer.close()

    def _wait_batch(self, stop: StopRequest) -> list[Group] | None:
        """Return the next batch; None when a signal asks to stop.

        Waits for: the dispatcher, `WAIT_S` at a time. Raises `RunFailedError` at the watchdog's deadlines.
        """
        began = logged = time.monotonic()
        while not stop:
            groups = self.dispatcher.take_batch(WAIT_S)
            if groups is not None:
                return groups
            self.trainer.idle()
            now = time.monotonic()
            if now - logged > LOG_WAITING_INTERVAL_S:
                logged = now
                logger.info("waiting for rollouts, %.0f s so far: %s", now - began, self.dispatcher.waiting_for())
        return None

    def _end_early(self, stop: StopRequest) -> RunOutcome:
        """Keep what was trained, as far as there is time before the machine is taken away."""
        left_s = self._left_of_grace_s(stop)
        if self.config.train.checkpoint_interval:
            if left_s is None or self.checkpoints.fits(left_s):
                self._save_checkpoint()
            else:
                logger.warning("no checkpoint: it would not fit into the %.0f s that are left of run.grace_s", left_s)
        if left_s is not None:
            return "paused"
        if self.trainer.policy_version:
            self._save_model()
        return "stopped"

    def _left_of_grace_s(self, stop: StopRequest) -> float | None:
        """Return the seconds before the machine ends this process by force; None where the signal asks for the run's end."""
        grace_s = self.config.run.grace_s
        if grace_s is None or stop.asked_at is None or stop.reason != "SIGTERM":
            return None
        return grace_s - (time.monotonic() - stop.asked_at)

    def _train(self, groups: Sequence[Group], phases: Phases, stop: StopRequest) -> bool:
        """Train on a batch; return False, and leave it to the next learner, if `stop` comes while the actors have the GPU."""
        first_version = self.trainer.policy_version
        phases.begin("train", f"training step {first_version + 1}")
        self._tune_trainer()
        with self._gpu(phases, stop) as is_taken:
            if not is_taken:
                return False
            steps = self.trainer.train_batch(list(groups))
        policy_version = self.trainer.policy_version
        self.dispatcher.finish_batch(groups, policy_version)
        self.wake_hub()
        if self._is_trained or _passes(self.config.weights.interval, first_version, policy_version):
            self._publish(phases)
        is_due = _passes(self.config.train.checkpoint_interval, first_version, policy_version)
        if is_due or self.dispatcher.is_log_over():
            if not is_due:
                logger.warning("a checkpoint is written early: the log has outgrown log.retain_mb. Raise it if that takes long")
            self._save_checkpoint()
        fleet = self.dispatcher.take_fleet_use()
        seconds = {
            "time/step_s": phases.total(),
            "time/wait_rollouts_s": phases.seconds("wait_rollouts"),
            "time/held_back_s": fleet.held_back_s,
            "time/publish_wait_s": phases.seconds("publish_wait"),
            "time/snapshot_s": phases.seconds("snapshot"),
        }
        self.step_rows.record(steps, groups, first_version, seconds, fleet)
        self.wake_hub()
        return True

    @contextlib.contextmanager
    def _gpu(self, phases: Phases, stop: StopRequest) -> Iterator[bool]:
        """Have the GPU inside the `with` block, where actors use it in turns with this process; see `LearnerTurn.taken`."""
        if self.gpu_turn is None:
            yield True
            return
        phases.begin("wait_gpu", "waiting for the actors to give up the GPU")
        # Only engines that are awake take weights.
        self.publisher.wait_until_taken(stop)
        with self.gpu_turn.taken(stop) as is_taken:
            phases.begin("train", f"training step {self.trainer.policy_version + 1}")
            yield is_taken

    def _save_checkpoint(self) -> None:
        version = self.trainer.policy_version
        if self._checkpointed != version and self.checkpoints.save():
            self._checkpointed = version

    def _save_model(self) -> None:
        self.dispatcher.doing("writing the model")
        folder = Path(self.config.run.dir) / MODEL
        try:
            self.trainer.save_model(folder)
        except CheckpointFailedError as error:
            raise RunFailedError(
                f"the trained model could not be written to {folder}: {error}. See that the disk has room and that "
                f"model.path can be read; then `offbeat export {self.config.run.dir}` writes the model of the newest checkpoint"
            ) from error
        logger.info("the trained model is in %s", folder)

    def _tune_trainer(self) -> None:
        """Bring every rank's trainer up to the settings in force."""
        settings = self.dispatcher.settings()
        loss, train = settings.loss, settings.train
        if (loss, train) == self._trained_with:
            return
        self._trained_with = (loss, train)
        self.trainer.tune(clip_low=loss.clip_low, clip_high=loss.clip_high, learning_rate=train.learning_rate)

    def _publish(self, phases: Phases) -> None:
        """Publish the weights, once a buffer is free to be filled."""
        version = self.trainer.policy_version
        phases.begin("publish_wait", f"publishing weights {version}")
        with self.publisher.writing() as buffer:
            phases.begin("snapshot")
            self.trainer.snapshot(buffer)
            score = self.trainer.score(self.canary.token_ids.tolist())
            self.canary.add(version, score.logprobs)
            self.routing.add(version, score.routing)
            # Known to the dispatcher first: an actor that commits it a moment later would be taken for a liar.
            self.dispatcher.publish(version, last=self._is_trained)
            self.publisher.publish(version)
        self.wake_hub()
        phases.begin("checkpoint")

    def _finish_evaluations(self, stop: StopRequest) -> bool:
        """Return whether no evaluation is missing.

        Waits for: the last evaluations, `WAIT_S` at a time. Unblocked by: their end, a signal, and `rollout.lease_timeout_s`
        without an answer.
        """
        answered_at, num_answers = time.monotonic(), self.dispatcher.num_evaluation_answers()
        while not self.dispatcher.wait_evaluations(WAIT_S):
            # The other ranks wait for a command meanwhile, but only `COMMAND_TIMEOUT_S`.
            self.trainer.idle()
            before, num_answers = num_answers, self.dispatcher.num_evaluation_answers()
            if num_answers > before:
                answered_at = time.monotonic()
            if stop or time.monotonic() > answered_at + self.config.rollout.lease_timeout_s:
                logger.warning("the last evaluation was not finished in time: %s", self.dispatcher.waiting_for())
                return False
        return True


def _passes(interval: int, before: int, after: int) -> bool:
    """Return whether a multiple of `interval` lies in `(before, after]`; an interval of 0 has none."""
    return interval > 0 and after // interval > before // interval


@dataclass(eq=False)
class Learner:
    """Rank 0's service: starts the threads around the training loop, and ends the run whatever happens in it."""

    loop: TrainingLoop
    _: KW_ONLY
    link: ActorLink
    publisher: WeightPublisher
    log: RolloutLog | None
    record: Recorder
    started: float
    """Time at which the learner's process began to load (monotonic); the run's wall time counts from there."""
    evaluation_numbers: EvaluationNumbers | None = None
    curriculum: Curriculum | None = None

    def run(self, stop: StopRequest) -> RunOutcome:
        """Run to the end; raises what ended the run early, after writing the final row."""
        try:
            software = ", ".join(f"{package} {version}" for package, version in software_versions().items())
            self.record(EventRow(event="run_started", detail=software))
            self.link.start()
            self.publisher.start(self.link)
            with naming_lost_ranks():
                outcome = self.loop.run(stop)
        except BaseException as error:
            self._end("failed", str(error) if isinstance(error, ServiceError) else f"{type(error).__name__}: {error}")
            raise
        self._end(outcome, stop.reason or "")
        return outcome

    def _end(self, outcome: str, detail: str) -> None:
        """End the run for every actor and close every part, whatever state the run is in."""
        # First, so that all finish or give up an update under way: actors that leave it look like failures.
        self.publisher.close()
        if self.curriculum is not None:
            self.curriculum.close()
        counts = self.link.pause() if outcome == "paused" else self.link.close(f"{outcome} {detail}".strip())
        # Evaluations end in the link's thread, and their rows come before the final one.
        if self.evaluation_numbers is not None:
            self.evaluation_numbers.close()
        final = FinalRow(
            policy_version=self.loop.trainer.policy_version,
            wall_s=time.monotonic() - self.started,
            ledger=counts,
            outcome=outcome,
            detail=detail,
        )
        self.record(final)
        assert counts.adds_up, f"the ledger does not add up: {counts}"
        try:
            if self.log is not None:
                self.log.close()
        finally:
            self.loop.close()
