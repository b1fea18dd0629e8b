"""The learner: groups in, optimizer steps, weights out. The training loop, and the wiring of what stands around it.

Hub <-> HubThread <-> Dispatcher -> batch -> RankedTrainer -> snapshot -> WeightPublisher -> actors
"""

import importlib.metadata
import logging
import math
import os
import random
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer

from offbeat.common.config import Config
from offbeat.common.hub_keys import keys_of_learner
from offbeat.common.metrics import MetricsWriter
from offbeat.common.models import hash_model, resolve_model
from offbeat.common.setting_checks import least_staleness
from offbeat.common.settings import SettingError, resolved_toml
from offbeat.common.shutdown import StopRequest
from offbeat.learner.diagnostics.calibration import changes, engine_numerics, learner_numerics, load_calibration
from offbeat.learner.diagnostics.routing_history import RoutingHistory
from offbeat.learner.dispatch.contract import Contract
from offbeat.learner.dispatch.dispatcher import Dispatcher, RunFailedError
from offbeat.learner.dispatch.hub_thread import HubThread
from offbeat.learner.dispatch.live_settings import Tuning
from offbeat.learner.leases.auto_bound import AutoBound, Noise
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.ledger import needed_position
from offbeat.learner.leases.prompts import Prompt, load_prompts
from offbeat.learner.leases.recovery import DispatcherState, Recovered, recover
from offbeat.learner.leases.rollout_log import LogFullError, Position, RolloutLog, read_log, read_record
from offbeat.learner.leases.staleness import StalenessPolicy
from offbeat.learner.progress import Progress
from offbeat.learner.training import checkpoints
from offbeat.learner.training.ranks import RankedTrainer
from offbeat.learner.training.trainer import Trainer
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.protocols.addresses import host_of
from offbeat.protocols.channels import Hub

logger = logging.getLogger(__name__)

Outcome = Literal["finished", "stopped"]

CHECKPOINTS = "checkpoints"
LOG = "log"
MODEL = "model"
CHUNK_REQUEST_BYTES = 4096
"""No message to the weight server is longer."""
WAIT_S = 1.0
"""How long the training loop waits for a batch before it looks at signals and deadlines."""
SAY_WAITING_INTERVAL_S = 30.0
CHECKPOINT_BYTES_PER_PARAMETER = 16
"""Weights in two precisions at most, and AdamW's two moments."""
CANARY_TOKENS = 64
CANARY_VERSIONS = 64
"""How many versions' canary log-probs are kept for actors that answer late."""
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest believable difference per token between engine and learner under the same weights, in nats."""


class ServiceState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint keeps beside model and optimizer."""

    run_id: str
    dispatcher: DispatcherState
    noise: Noise | None = None
    """The automatic bound's."""


def run_learner(config: Config, stop: StopRequest) -> Outcome:
    """Train until `train.num_steps` or a signal; every rank of the learner calls this."""
    if int(os.environ.get("RANK", "0")) > 0:
        RankedTrainer(Trainer(config)).follow()
        return "finished"
    with ExitStack() as stack:
        folder = prepare_folder(config)
        metrics = MetricsWriter(folder, tensorboard=config.metrics.tensorboard, wandb_project=config.metrics.wandb_project)
        stack.enter_context(metrics)
        bind = config.hub.bind or config.hub.address
        keys = keys_of_learner(config.hub)

        def open_weight_hub() -> Hub:
            address = f"{bind.rpartition(':')[0]}:{config.weights.pull_port or '*'}"
            return Hub(address, max_message_bytes=CHUNK_REQUEST_BYTES, key=keys.key, allowed=keys.allowed)

        # Bound before the model is loaded: a port in use is reported at once.
        hub = Hub(bind, max_message_bytes=config.hub.max_message_mb << 20, key=keys.key, allowed=keys.allowed)
        stack.enter_context(hub)
        return Learner(config, folder, metrics, hub, open_weight_hub, stop).run()


def prepare_folder(config: Config) -> Path:
    """Make the run's folder and write the resolved config there."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(resolved_toml(config))
    return folder


class Learner:
    """Rank 0: see the module's docstring."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        metrics: MetricsWriter,
        hub: Hub,
        open_weight_hub: Callable[[], Hub],
        stop: StopRequest,
    ) -> None:
        self._config = config
        self._folder = folder
        self._metrics = metrics
        self._stop = stop
        self._started = time.monotonic()
        self._progress = Progress(config.train.num_steps)
        self._canaries: dict[int, np.ndarray] = {}
        self._routings = RoutingHistory()
        noise_floor = config.loss.noise_floor
        self._calibration = load_calibration(noise_floor) if noise_floor else None

        model = resolve_model(config.model.path)
        self._hashes = hash_model(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        task = config.task
        prompts = self._load_prompts(task.train_data, task.train_split, "task.train_data", tokenizer)
        eval_prompts = (
            self._load_prompts(task.eval_data, task.eval_split, "task.eval_data", tokenizer) if task.eval_data else []
        )
        self._trainer = RankedTrainer(Trainer(config))
        state = self._load_checkpoint() if config.run.resume else None
        self._log = self._open_log(state)
        recovered = self._recover(state, prompts)
        self._run_id = (state.run_id if state else recovered.run_id) or uuid.uuid4().hex[:12]
        self._canary_token_ids = _canary(prompts, min(CANARY_TOKENS, config.model.max_length - 1))
        layout = self._trainer.layout()
        self._checkpoint_bytes = CHECKPOINT_BYTES_PER_PARAMETER * sum(math.prod(spec.shape) for spec in layout)
        tuning = Tuning(config, recovered.tuned)
        self._tell_kept(tuning)
        self._staleness = StalenessPolicy(tuning.config.staleness, config.train)
        self._auto_bound = AutoBound(least_staleness(config), state.noise if state else None)
        self._trained_with = (config.loss, config.train)
        """What of the settings the trainer has; `_tune_trainer` brings it up to date."""
        self._dispatcher = Dispatcher(
            contract=Contract(
                run_id=self._run_id,
                learner_incarnation=random.SystemRandom().getrandbits(62),
                layout=layout,
                canary_token_ids=self._canary_token_ids,
                dtype=config.model.dtype,
                hashes=self._hashes,
                max_length=task.max_prompt_tokens + config.rollout.max_new_tokens,
                vocabulary_size=AutoConfig.from_pretrained(model).get_text_config().vocab_size,
                temperature=config.rollout.temperature,
                reward=task.reward,
                software=importlib.metadata.version("offbeat"),
                max_message_bytes=config.hub.max_message_mb << 20,
            ),
            rollout=config.rollout,
            evaluation=config.evaluation,
            hub=config.hub,
            prompts=prompts,
            eval_prompts=eval_prompts,
            stream=recovered.stream,
            ledger=recovered.ledger,
            log=self._log,
            staleness=self._staleness,
            tuning=tuning,
            drop_zero_variance=config.loss.zero_variance == "drop",
            drop_quarantined=config.weights.on_canary_mismatch == "drop",
            max_failed_leases=config.train.max_failed_leases,
            num_steps=config.train.num_steps,
            policy_version=self._trainer.policy_version,
            newest_version=recovered.newest_version,
            record=self._record,
            on_join=self._welcome_actor,
            on_weights=lambda actor, message: self._publisher.handle(actor, message),
            on_canary=self._compare_canary,
            on_routed=self._compare_routing,
            on_distrust=lambda peer, actor, why: self._publisher.distrust(peer, actor, why),
            weight_problems=lambda: self._publisher.problems(),
            hub_rejections=lambda: _hub_rejections(hub),
        )
        self._hub = hub
        self._hub_thread = HubThread(hub, self._dispatcher)
        self._publisher = WeightPublisher(
            layout=layout,
            members=self._dispatcher.members,
            post=self._post,
            record=self._record,
            host=host_of(config.hub.address),
            listen_on=host_of(config.hub.bind or config.hub.address),
            port=config.weights.port,
            backend=_backend(config, self._trainer.device),
            timeout_s=config.weights.timeout_s,
            bucket_bytes=config.weights.bucket_mb << 20,
            open_hub=open_weight_hub,
            chunk_bytes=config.weights.chunk_mb << 20,
            max_pulls=config.weights.max_pulls,
            max_pull_lag=lambda: self._staleness.bounds.max_staleness,
            on_failure=self._dispatcher.fail,
        )

    def run(self) -> Outcome:
        """The whole run; raises what ended it early, after writing the final row."""
        with self._progress:
            try:
                outcome = self._run()
            except BaseException as error:
                detail = str(error) if isinstance(error, RunFailedError) else f"{type(error).__name__}: {error}"
                self._end("failed", detail)
                raise
            self._end(outcome, self._stop.reason)
            return outcome

    def _run(self) -> Outcome:
        logger.info("run %s in %s; hub at %s", self._run_id, self._folder, self._hub.address)
        self._record("event", event="run_started", detail=_software())
        if self._calibration is not None:
            numerics = learner_numerics(self._config, self._hashes, self._trainer.device)
            self._compare_calibration("", changes(self._calibration.learner, numerics))
        self._dispatcher.begin()
        self._hub_thread.start()
        self._publisher.start()
        # Before any wait for data: actors that are there already need these weights to produce it.
        self._publish()
        num_steps = self._config.train.num_steps
        while self._trainer.policy_version < num_steps:
            started = time.monotonic()
            self._dispatcher.doing("waiting for rollouts")
            groups = self._wait_batch()
            if groups is None:
                if self._config.train.checkpoint_interval:
                    self._save_checkpoint()
                return "stopped"
            self._train(groups, started)
        self._dispatcher.doing("waiting for the last evaluation")
        self._finish_evaluations()
        self._dispatcher.doing("writing the model")
        self._trainer.save_model(self._folder / MODEL)
        logger.info("the trained model is in %s", self._folder / MODEL)
        return "finished"

    def _end(self, outcome: str, detail: str) -> None:
        """Tell everyone; whatever state the run is in."""
        # First, so that an update under way is finished, or given up, by all: actors that leave it look like failures.
        self._publisher.close()
        self._dispatcher.stop(f"{outcome} {detail}".strip())
        self._hub.wake()
        # What an actor has not read when the connection closes is lost to it: it would wait for a learner that is gone.
        # One that is cut off may be back before it counts as dead.
        patience_s = self._config.hub.dead_after_s + self._config.hub.heartbeat_s
        if not self._dispatcher.wait_left(patience_s):
            names = [name for _, name, _ in self._dispatcher.members()]
            logger.warning("actors that did not leave within %g s: %s", patience_s, names)
        self._hub_thread.close()
        counts = self._dispatcher.counts()
        self._record(
            "final",
            policy_version=self._trainer.policy_version,
            wall_s=time.monotonic() - self._started,
            ledger=msgspec.structs.asdict(counts),
            outcome=outcome,
            detail=detail,
        )
        assert counts.adds_up, f"the ledger does not add up: {counts}"
        if self._log is not None:
            self._log.close()
        self._trainer.close()

    # The loop's parts

    def _wait_batch(self) -> list[Group] | None:
        """The next batch; None when a signal asks to stop.

        Waits for: the dispatcher, `WAIT_S` at a time. Raises `RunFailedError` when no actor comes in time.
        """
        began = said = time.monotonic()
        alone_since: float | None = None
        while not self._stop:
            groups = self._dispatcher.take_batch(WAIT_S)
            if groups is not None:
                return groups
            self._trainer.idle()
            now = time.monotonic()
            alone_since = None if self._dispatcher.members() else alone_since or now
            self._check_alone(now - (alone_since or now))
            if now - said > SAY_WAITING_INTERVAL_S:
                said = now
                logger.info("waiting for rollouts, %.0f s so far: %s", now - began, self._dispatcher.waiting_for())
        return None

    def _check_alone(self, alone_s: float) -> None:
        limit_s = self._config.train.no_actor_timeout_s
        if limit_s and alone_s > limit_s:
            raise RunFailedError(
                f"no actor for {alone_s:.0f} s (train.no_actor_timeout_s = {limit_s:g}): start one with `offbeat actor` "
                f"and hub.address = {self._config.hub.address}"
            )

    def _train(self, groups: Sequence[Group], started: float) -> None:
        waited_s = time.monotonic() - started
        first_version = self._trainer.policy_version
        self._tune_trainer()
        self._dispatcher.doing(f"training step {first_version + 1}")
        steps = self._trainer.train_batch(list(groups))
        policy_version = self._trainer.policy_version
        self._dispatcher.finish_batch(groups, policy_version)
        self._hub.wake()
        publish_wait_s = snapshot_s = 0.0
        is_last = policy_version >= self._config.train.num_steps
        if is_last or policy_version // self._config.weights.interval > first_version // self._config.weights.interval:
            publish_wait_s, snapshot_s = self._publish(last=is_last)
        interval = self._config.train.checkpoint_interval
        if (interval and policy_version // interval > first_version // interval) or self._dispatcher.is_log_over():
            self._save_checkpoint()
        self._record_steps(
            steps,
            groups,
            first_version,
            {
                "time/step_s": (time.monotonic() - started) / len(steps),
                "time/wait_rollouts_s": waited_s / len(steps),
                "time/held_back_s": self._dispatcher.take_held_back_s() / len(steps),
                "time/publish_wait_s": publish_wait_s / len(steps),
                "time/snapshot_s": snapshot_s / len(steps),
            },
        )

    def _tune_trainer(self) -> None:
        """Bring every rank's trainer up to the settings in force."""
        settings = self._dispatcher.settings()
        loss, train = settings.loss, settings.train
        if (loss, train) == self._trained_with:
            return
        self._trained_with = (loss, train)
        self._trainer.tune(clip_low=loss.clip_low, clip_high=loss.clip_high, learning_rate=train.learning_rate)

    def _record_steps(
        self, steps: list[dict[str, Any]], groups: Sequence[Group], first_version: int, shares: dict[str, float]
    ) -> None:
        train = self._config.train
        ready, in_flight = self._dispatcher.buffer_sizes()
        rows: list[dict[str, Any]] = []
        for index, step in enumerate(steps):
            start = index % train.steps_per_batch * train.groups_per_step
            of_step = groups[start : start + train.groups_per_step]
            row = {
                **step,
                **shares,
                "staleness/bound": self._staleness.bounds.max_staleness,
                "staleness/over_bound": self._staleness.count_over_bound(of_step, first_version + index),
                "buffer/ready": ready,
                "buffer/in_flight": in_flight,
            }
            self._show({"kind": "step", "policy_version": first_version + index + 1, **row})
            rows.append(row)
        self._move_bound(rows)
        if first_version == 0:
            first = steps[0]
            logger.info(
                "FIRST RATIO of the run, where nothing is stale (lag up to %d): mean |s - 1| = %.2e, %.1f%% of completions "
                "clipped, KL of engine and learner %.2e per token (k3)",
                first["lag/max"],
                first["ratio/first"],
                100 * first["clip/fraction"],
                first["kl/behavior_policy_k3"],
            )

    def _move_bound(self, steps: Sequence[dict[str, Any]]) -> None:
        """Have the automatic bound see these steps, and do as it says."""
        for step in steps:
            decision = self._auto_bound.observe(step, self._dispatcher.settings().staleness)
            if decision is None:
                continue
            change = {"staleness.max_staleness": str(decision.max_staleness)}
            try:
                self._dispatcher.tune(change, "auto", decision.reason)
            except (SettingError, LogFullError) as error:
                # An operator was faster, or the disk is full: the steps to come will tell again.
                logger.info("the automatic bound stays where it is: %s", error)
            self._hub.wake()

    def _publish(self, *, last: bool = False) -> tuple[float, float]:
        """Snapshot the weights for the publisher; seconds waited for its buffer, seconds to fill it."""
        version = self._trainer.policy_version
        self._dispatcher.doing(f"publishing weights {version}")
        started = time.monotonic()
        with self._publisher.writing() as buffer:
            waited = time.monotonic()
            self._trainer.snapshot(buffer)
            self._score_canary(version)
            self._publisher.publish(version)
            self._dispatcher.publish(version, last=last)
        self._hub.wake()
        return waited - started, time.monotonic() - waited

    def _score_canary(self, version: int) -> None:
        score = self._trainer.score(self._canary_token_ids.tolist())
        self._canaries[version] = score.logprobs
        self._canaries.pop(version - CANARY_VERSIONS, None)
        if score.routing is not None and self._config.metrics.routing_interval:
            self._routings.add(version, score.routing)
            if self._is_routing_due(version):
                self._record("routing", policy_version=version, **self._routings.metrics())

    def _is_routing_due(self, version: int) -> bool:
        """Whether this is the first version sent of its interval."""
        interval = self._config.metrics.routing_interval
        return interval > 0 and version % interval < self._config.weights.interval

    def _finish_evaluations(self) -> None:
        """Waits for: the last evaluations, `WAIT_S` at a time. Unblocked by: their end, a signal, `rollout.lease_timeout_s`."""
        deadline = time.monotonic() + self._config.rollout.lease_timeout_s
        while not self._dispatcher.wait_evaluations(WAIT_S):
            # The other ranks wait for a command meanwhile, and not for ever.
            self._trainer.idle()
            if self._stop or time.monotonic() > deadline:
                logger.warning("the last evaluation was not finished in time: %s", self._dispatcher.waiting_for())
                return

    def _save_checkpoint(self) -> None:
        """A full disk costs this checkpoint, not the run: the log has what happened since the last one."""
        self._dispatcher.doing("writing a checkpoint")
        root = self._folder / CHECKPOINTS
        folder = checkpoints.checkpoint_folder(root, self._trainer.policy_version)
        try:
            checkpoints.require_room(root, self._checkpoint_bytes)
            state = ServiceState(self._run_id, self._dispatcher.state(), self._auto_bound.noise)
            self._trainer.save_checkpoint(folder, msgspec.msgpack.encode(state))
        except (checkpoints.NoRoomError, LogFullError) as error:
            detail = f"{folder}: {error}; the run goes on, and a restart would begin at the checkpoint before"
            logger.warning(detail)
            self._record("event", event="checkpoint_failed", detail=detail)
            return
        checkpoints.prune(root, keep=self._config.train.keep_checkpoints)
        if self._log is not None:
            self._dispatcher.prune_log(self._needed_of_oldest(root))
        logger.info("checkpoint %s", folder)

    def _needed_of_oldest(self, root: Path) -> Position:
        """The first record that a restart from the oldest kept checkpoint reads."""
        oldest = min(checkpoints.whole(root))
        dispatcher = msgspec.msgpack.decode(checkpoints.read_extra(oldest), type=ServiceState).dispatcher
        return needed_position(dispatcher.ledger.open, dispatcher.log_end or Position(0, 0))

    def _load_checkpoint(self) -> ServiceState | None:
        newest = checkpoints.newest(self._folder / CHECKPOINTS)
        if newest is not None:
            extra = self._trainer.load_checkpoint(newest)
            logger.info("resumed from %s", newest)
            return msgspec.msgpack.decode(extra, type=ServiceState)
        if not (self._config.log.enabled and (self._folder / LOG).is_dir()):
            raise SettingError(
                "run.resume",
                True,
                f"there is neither a checkpoint in {self._folder / CHECKPOINTS} nor a rollout log",
                "Start anew in another run.dir, and set train.checkpoint_interval to have checkpoints.",
            )
        logger.info("no checkpoint in %s: training begins again, with the rollout log's groups", self._folder / CHECKPOINTS)
        return None

    def _open_log(self, state: ServiceState | None) -> RolloutLog | None:
        settings = self._config.log
        if not settings.enabled:
            return None
        return RolloutLog(
            self._folder / LOG,
            fsync=settings.fsync,
            segment_bytes=settings.segment_mb << 20,
            retain_bytes=settings.retain_mb << 20,
            min_free_bytes=settings.min_free_mb << 20,
            after=state.dispatcher.log_end if state else None,
        )

    def _recover(self, state: ServiceState | None, prompts: list[Prompt]) -> Recovered:
        """The ledger, buffer and prompt order as they were when the process before this one ended."""
        folder = self._folder / LOG
        log_end = state.dispatcher.log_end if state else Position(0, 0)
        is_readable = self._log is not None and log_end is not None
        recovered = recover(
            state.dispatcher if state else None,
            read_log(folder, log_end) if is_readable else (),
            lambda position: read_record(folder, position),
            prompts,
            self._config.run.seed,
        )
        if self._config.run.resume:
            ledger = recovered.ledger
            detail = (
                f"at policy version {self._trainer.policy_version}; {recovered.num_records} log records applied, "
                f"{ledger.num_ready} groups reused, {ledger.num_open - ledger.num_ready} leases in flight"
            )
            logger.info("resumed: %s", detail)
            self._record("event", event="resumed", detail=detail, num_reused=ledger.num_ready)
        return recovered

    def _tell_kept(self, tuning: Tuning) -> None:
        """Settings that an operator changed before a restart are not the config's any more: say so."""
        for change in tuning.in_force():
            detail = (
                f"{change.setting} = {change.after}, as {change.who} set it at policy version {change.policy_version} on "
                f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(change.at))}, not {change.before} as in the config; to "
                f"change it back: offbeat set {self._folder} {change.setting}={change.before}"
            )
            logger.warning(detail)
            self._record("event", event="setting_kept", detail=detail, setting=change.setting, value=change.after)

    # What other threads call

    def _post(self, peer: bytes, message: Any) -> None:
        self._dispatcher.post(peer, message)
        self._hub.wake()

    def _welcome_actor(self, peer: bytes) -> None:
        """An actor has joined: its weights, and whether its engine is the one that was calibrated."""
        self._publisher.joined(peer)
        hello = self._dispatcher.hello_of(peer)
        self._record("engine", actor=hello.actor, engine=msgspec.to_builtins(hello.engine))
        if self._calibration is not None:
            self._compare_calibration(hello.actor, changes(self._calibration.engine, engine_numerics(hello.engine)))

    def _compare_calibration(self, actor: str, changed: list[str]) -> None:
        if not changed:
            return
        detail = f"{actor or 'the learner'} is not what loss.noise_floor was measured on, and its noise may be another: "
        detail += "; ".join(changed) + ". Run `offbeat calibrate` again."
        logger.warning(detail)
        self._record("event", event="calibration_mismatch", detail=detail, **({"actor": actor} if actor else {}))

    def _compare_canary(self, actor: str, policy_version: int, logprobs: np.ndarray) -> None:
        """Weights announced are weights applied: the engine must score the canary as the learner does."""
        expected = self._canaries.get(policy_version)
        if expected is None or expected.shape != logprobs.shape:
            return
        max_abs_diff = float(np.abs(expected - logprobs).max())
        self._record("canary", actor=actor, policy_version=policy_version, max_abs_diff=max_abs_diff)
        # Not `>`: a NaN must not pass.
        is_wrong = not max_abs_diff <= CANARY_TOLERANCE[self._config.model.dtype]
        detail = f"its log-probs of the canary differ by {max_abs_diff:.2g} at version {policy_version}" if is_wrong else ""
        self._dispatcher.judge_canary(actor, policy_version, detail)

    def _compare_routing(self, actor: str, policy_version: int, experts: np.ndarray) -> None:
        """What of the routing differs between engine and learner, under the same weights."""
        if not self._is_routing_due(policy_version):
            return
        metrics = self._routings.engine_metrics(policy_version, experts)
        if metrics:
            self._record("routing", actor=actor, policy_version=policy_version, **metrics)

    def _record(self, kind: str, **row: Any) -> None:
        self._show({"kind": kind, **row})

    def _show(self, row: dict[str, Any]) -> None:
        self._progress.show(self._metrics.write_row(row))

    def _load_prompts(self, source: str, split: str, setting: str, tokenizer: Any) -> list[Prompt]:
        loaded = load_prompts(source, split, self._config.task, tokenizer, setting=setting)
        if loaded.num_dropped:
            logger.info("%s: %d prompts left out as too long", setting, loaded.num_dropped)
        return loaded.prompts


def _hub_rejections(hub: Hub) -> dict[str, int]:
    """What the hub turned away before it was a message; for the hub's thread."""
    refused = {"connections without an allowed key": hub.num_refused} if hub.num_refused else {}
    return dict(hub.num_dropped) | refused


def _software() -> str:
    """The versions that a result depends on."""
    packages = ("offbeat", "torch", "deepspeed", "transformers")
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


def _backend(config: Config, device: torch.device) -> Literal["gloo", "nccl", "pull"]:
    if config.weights.backend != "auto":
        return config.weights.backend
    return "nccl" if device.type == "cuda" else "gloo"


def _canary(prompts: Sequence[Prompt], num_tokens: int) -> np.ndarray:
    """A fixed sequence that every version of the policy is scored on: the first prompts, one after another."""
    token_ids = np.concatenate([prompt.token_ids for prompt in prompts[:num_tokens]])
    return token_ids[:num_tokens].astype(np.int32)
