"""The learner's wiring: every part is made here, in order, and handed what it uses."""

import importlib.metadata
import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig

from offbeat.common.errors import SettingError
from offbeat.common.models.folders import hash_model, load_tokenizer, resolve_model
from offbeat.common.processes.durable_files import replace
from offbeat.common.processes.environment import launcher_rank
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import doing, log_to_file
from offbeat.common.records.rows import Recorder, Row
from offbeat.common.records.run_folder import CONFIG_FILE, PROGRAM_LOGS, check_run_folder, set_aside_failed_start
from offbeat.common.records.writer import MetricsWriter
from offbeat.common.settings.checks import least_staleness
from offbeat.common.settings.config import Config, RunSection
from offbeat.common.settings.hub_keys import keys_of_learner
from offbeat.common.settings.loading import resolved_toml, weighted_reward
from offbeat.common.user_code.callback import Callback
from offbeat.common.user_code.sources import hash_sources
from offbeat.common.weights.nccl_group import gpu_uuid
from offbeat.learner.actor_link import ActorLink
from offbeat.learner.calibration.calibration import Calibration, learner_numerics, load_calibration
from offbeat.learner.calibration.watch import CalibrationWatch
from offbeat.learner.curriculum import Curriculum
from offbeat.learner.diagnostics.own_evaluation import EvaluationNumbers, OwnEvaluation, load_evaluation
from offbeat.learner.diagnostics.sample_rows import Decode, SampleRows
from offbeat.learner.dispatch.contract import Contract, expert_limits
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.evaluation_leases import FinishEvaluation
from offbeat.learner.dispatch.hub_thread import HubThread
from offbeat.learner.dispatch.listeners import Listeners
from offbeat.learner.dispatch.live_settings import LiveSettings
from offbeat.learner.dispatch.parts import Prompts, make_parts
from offbeat.learner.dispatch.versions import Versions
from offbeat.learner.hub_address import tell_address
from offbeat.learner.leases.auto_bound import AutoBound
from offbeat.learner.leases.demand import Demand
from offbeat.learner.leases.journal import LeaseJournal
from offbeat.learner.leases.own_curriculum import OwnCurriculum
from offbeat.learner.leases.prompts import MUCH_LEFT_OUT, Prompt, load_held_out, load_prompts
from offbeat.learner.leases.recovery import Recovered
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.learner.reporting.health_watch import HealthWatch
from offbeat.learner.reporting.page.live_page import LivePage, serving
from offbeat.learner.reporting.step_rows import StepRows
from offbeat.learner.reporting.terminal import Progress
from offbeat.learner.reporting.trackers.tracking import tracking
from offbeat.learner.restart.resume import (
    Checkpoints,
    check_identity,
    find_run_id,
    last_actor_hours,
    load_checkpoint,
    noting_evaluations,
    open_log,
    recover_run,
    require_own_log,
    set_damaged_aside,
    tell_damaged,
    tell_kept_settings,
    tell_resumed,
)
from offbeat.learner.restart.run_identity import (
    Change,
    PromptHashes,
    RunIdentity,
    hash_prompts,
    make_identity,
    tell_changes,
    write_identity,
)
from offbeat.learner.run_kit import make_kit
from offbeat.learner.service import Learner, RunOutcome, TrainingLoop
from offbeat.learner.training.ranks import RankedTrainer
from offbeat.learner.training.trainer import Trainer
from offbeat.learner.weights.canary import CANARY_TOKENS, Canary, canary_token_ids
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.transport import LearnerGpu, Transport
from offbeat.protocols.addresses import host_of
from offbeat.protocols.channels import Hub
from offbeat.protocols.connection_limits import FILES_PER_PEER
from offbeat.protocols.message_parts import ModelHashes
from offbeat.protocols.messages import Hello, TensorSpec

logger = logging.getLogger(__name__)

REBIND_S = 60.0
"""Seconds for which a learner that resumes tries to bind a hub address that another process has taken."""
CHUNK_REQUEST_BYTES = 4096
"""Longest message to the weight server."""
LOADING = "ended while the learner was loading"
"""The last words of a learner that a signal ends before it works."""


def run_learner(config: Config, stop: StopRequest) -> RunOutcome:
    """Train until `train.num_steps` or a signal; every rank of the learner calls this, rank 0 with the run's folder locked."""
    if launcher_rank() > 0:
        RankedTrainer(Trainer(config)).follow()
        return "finished"
    started = time.monotonic()
    folder = Path(config.run.dir)
    with ExitStack() as stack:
        bind = config.hub.bind or config.hub.address
        keys = keys_of_learner(config.hub)

        def open_weight_hub() -> Hub:
            address = f"{bind.rpartition(':')[0]}:{config.weights.pull_port or '*'}"
            return Hub(address, max_message_bytes=CHUNK_REQUEST_BYTES, key=keys.key, allowed=keys.allowed)

        # Bound before the data is read: a port in use is reported at once.
        hub = Hub(
            bind,
            max_message_bytes=config.hub.max_message_mb << 20,
            key=keys.key,
            allowed=keys.allowed,
            # A restart finds actors waiting at the address, and whatever took it meanwhile may leave.
            patience_s=REBIND_S if config.run.resume else 0.0,
        )
        stack.enter_context(hub)
        address = tell_address(config.hub.address, hub.address)
        with stop.at_once(LOADING), doing(logger, "reading data, tokenizer and weight files"):
            inputs = _load_inputs(config)
        run_id = (find_run_id(folder) if config.run.resume else None) or uuid.uuid4().hex[:12]
        inputs = inputs._replace(identity=msgspec.structs.replace(inputs.identity, run_id=run_id))
        damaged = set_damaged_aside(folder, run_id) if config.run.resume else []
        changes = prepare_folder(config, inputs.identity, inputs.prompt_hashes)
        log_to_file(folder / PROGRAM_LOGS / "learner.log", "learner")
        metrics = stack.enter_context(MetricsWriter(folder, tensorboard=config.metrics.tensorboard))
        progress = Progress(config.train.num_steps)
        page = LivePage(folder.resolve().name) if config.metrics.bind else None
        if page is not None:
            page.add_former(folder)
        path = config.metrics.callback
        callback = stack.enter_context(Callback(path, folder / PROGRAM_LOGS / "callback.log", stop.ask)) if path else None
        takers = [progress.add, *(taker.add for taker in (page, callback) if taker is not None)]

        def record(row: Row) -> None:
            row = metrics.write(row)
            for take in takers:
                take(row)

        takers.append(stack.enter_context(tracking(config, record)))
        stack.enter_context(_mirroring(config.run, record))
        tell_damaged(damaged, record)
        tell_changes(changes, record)
        with stop.at_once(LOADING), doing(logger, "loading the model"):
            learner = open_learner(config, inputs, hub, open_weight_hub, record, started, host=host_of(address))
            if callback is not None:
                callback.wait_loaded()
        if page is not None:
            routes = page.routes(learner.link.status, learner.link.silence_s)
            stack.enter_context(serving(routes, config.metrics.bind, folder))
        with progress:
            return learner.run(stop)


def prepare_folder(config: Config, identity: RunIdentity, prompt_hashes: PromptHashes) -> list[Change]:
    """Write config and identity to the run's folder, which is locked; return what differs from the run that is resumed.

    Before a new run, sets aside what a failed start left there. Raises `SettingError`, and changes nothing, for a folder that
    cannot be used so, and for a difference that a resumed run may not have.
    """
    folder = Path(config.run.dir)
    # Checked again now that no other learner can be at work there.
    check_run_folder(config.run)
    if config.run.resume:
        require_own_log(folder, identity.run_id)
    may_append = config.task.appended_data == "allow"
    changes = check_identity(folder, identity, prompt_hashes, may_append=may_append) if config.run.resume else []
    if not config.run.resume and (aside := set_aside_failed_start(folder)) is not None:
        logger.info("an earlier start made no step: its files are in %s", aside)
    replace(folder / CONFIG_FILE, resolved_toml(config).encode())
    write_identity(folder, identity, prompt_hashes)
    return changes


def open_learner(
    config: Config,
    inputs: "_Inputs",
    hub: Hub,
    open_weight_hub: Callable[[], Hub],
    record: Recorder,
    started: float,
    *,
    host: str,
) -> Learner:
    """Make every part of rank 0: load the model, resume or begin the run, wire the services; nothing is running yet.

    `started` is when the learner's process began to load (monotonic); `host` is this machine, as actors reach it.
    """
    folder = Path(config.run.dir)
    health = HealthWatch(noting_evaluations(folder, record))
    record = health.record
    trainer = RankedTrainer(Trainer(config))
    canary_ids = _canary_token_ids(config, inputs.prompts.train)
    # Before a checkpoint replaces the weights of the files: each actor scores these too, which measures its engine's noise.
    scored = trainer.score(canary_ids.tolist())
    run = _resume(config, folder, trainer, inputs.prompts.train, record)
    canary = _make_canary(run.settings, canary_ids, scored.logprobs, record)
    publisher = WeightPublisher(
        layout=trainer.layout(),
        transport=_transport(config, trainer.device, host),
        open_hub=open_weight_hub,
        max_pull_lag=lambda: run.settings.staleness.bounds.max_staleness,
        record=record,
    )
    watch = _watch_calibration(config, inputs, trainer.device, record)
    contract = _make_contract(config, inputs, trainer.layout(), canary)._replace(
        max_peers=_max_peers(config, hub), experts=expert_limits(config, scored.routing)
    )
    demand = Demand(last_actor_hours(folder) if config.run.resume else 0.0)
    listeners = _make_listeners(hub, publisher, canary, watch, health, demand)
    numbers = _make_evaluation_numbers(inputs, record)
    dispatcher = _make_dispatcher(contract, run, inputs, listeners, trainer.policy_version, record, numbers and numbers.finish)
    curriculum = _begin_curriculum(inputs, dispatcher, trainer.policy_version, record)
    samples = SampleRows(config.train.num_steps, inputs.decode, record)
    loop = TrainingLoop(
        config,
        trainer=trainer,
        dispatcher=dispatcher,
        publisher=publisher,
        canary=canary,
        checkpoints=_make_checkpoints(config, inputs.identity, run, trainer, dispatcher, record),
        step_rows=StepRows(config.train, dispatcher, run.auto_bound, demand, curriculum, samples, watch, record),
        wake_hub=hub.wake,
    )
    logger.info("run %s in %s; hub at %s", inputs.identity.run_id, folder, hub.address)
    return Learner(
        loop,
        # An actor that is cut off may be back before it counts as dead.
        link=ActorLink(dispatcher, HubThread(hub, dispatcher), config.hub.dead_after_s + config.hub.heartbeat_s),
        publisher=publisher,
        log=run.log,
        record=record,
        started=started,
        evaluation_numbers=numbers,
        curriculum=curriculum,
    )


def _mirroring(run: RunSection, record: Recorder) -> AbstractContextManager[object]:
    if not run.mirror:
        return nullcontext()
    from offbeat.learner.restart.mirror import open_mirror

    return open_mirror(Path(run.dir), run.mirror, record, resume=bool(run.resume))


class _Inputs(NamedTuple):
    """The files that a run reads and never changes, but for the weights."""

    identity: RunIdentity
    prompt_hashes: PromptHashes
    """The hashes of the training prompts."""
    prompts: Prompts
    decode: Decode
    decode_plain: Decode
    """Without special tokens."""
    own_evaluation: OwnEvaluation | None
    own_curriculum: OwnCurriculum | None
    hashes: ModelHashes
    vocabulary_size: int
    calibration: Calibration | None


class _Run(NamedTuple):
    """The run as the learner process before this one left it, or at its beginning."""

    recovered: Recovered
    settings: LiveSettings
    auto_bound: AutoBound
    log: RolloutLog | None


def _load_inputs(config: Config) -> _Inputs:
    task = config.task
    model = resolve_model(config.model.path)
    hashes = hash_model(model)
    tokenizer = load_tokenizer(model)
    calibration = load_calibration(config.loss.noise_floor) if config.loss.noise_floor else None
    train = _load_prompts(config, task.train_data, task.train_split, "task.train_data", tokenizer)
    held_out = load_held_out(
        task,
        config.evaluation.num_prompts,
        lambda setting, source: _load_prompts(config, source, task.eval_split, setting, tokenizer),
    )
    prompt_hashes = hash_prompts(train)
    return _Inputs(
        identity=make_identity(config, hashes, prompt_hashes, hash_prompts(held_out)),
        prompt_hashes=prompt_hashes,
        prompts=Prompts(train, held_out),
        decode=tokenizer.decode,
        decode_plain=partial(tokenizer.decode, skip_special_tokens=True),
        own_evaluation=load_evaluation(config.evaluation.function) if config.evaluation.function else None,
        own_curriculum=OwnCurriculum(task.curriculum) if task.curriculum else None,
        hashes=hashes,
        vocabulary_size=AutoConfig.from_pretrained(model).get_text_config().vocab_size,
        calibration=calibration,
    )


def _watch_calibration(config: Config, inputs: _Inputs, device: torch.device, record: Recorder) -> CalibrationWatch:
    """Warn of a learner and of bounds that do not suit the calibration; return the watch over actors."""
    watch = CalibrationWatch(inputs.calibration, record)
    watch.check_learner(learner_numerics(config, inputs.hashes, device))
    watch.check_bounds(config.loss, max_new_tokens=config.rollout.max_new_tokens)
    return watch


def _resume(config: Config, folder: Path, trainer: RankedTrainer, prompts: Sequence[Prompt], record: Recorder) -> _Run:
    """Bring trainer, leases and settings to where the run stands; begin it without `run.resume`."""
    has_log = config.log.enabled
    state = load_checkpoint(folder, trainer, has_log=has_log) if config.run.resume else None
    log = open_log(folder, config.log, state)
    may_append = config.task.appended_data == "allow"
    recovered = recover_run(folder, state, prompts, config.run.seed, has_log=has_log, may_append=may_append)
    if config.run.resume:
        tell_resumed(recovered, trainer.policy_version, record)
    settings = LiveSettings(config, recovered.tuned)
    tell_kept_settings(settings, folder, record)
    return _Run(
        recovered=recovered,
        settings=settings,
        auto_bound=AutoBound(least_staleness(config), state.noise if state else None),
        log=log,
    )


def _canary_token_ids(config: Config, prompts: Sequence[Prompt]) -> NDArray[np.int32]:
    return canary_token_ids([prompt.token_ids for prompt in prompts], min(CANARY_TOKENS, config.model.max_length - 1))


def _make_canary(
    settings: LiveSettings, token_ids: NDArray[np.int32], file_logprobs: NDArray[np.float32], record: Recorder
) -> Canary:
    config = settings.config
    return Canary(
        token_ids,
        dtype=config.model.dtype,
        file_logprobs=file_logprobs,
        tolerance=lambda: settings.config.weights.canary_tolerance,
        routing_interval=config.metrics.routing_interval,
        publish_interval=config.weights.interval,
        record=record,
    )


def _make_contract(config: Config, inputs: _Inputs, layout: tuple[TensorSpec, ...], canary: Canary) -> Contract:
    return Contract(
        run_id=inputs.identity.run_id,
        learner_incarnation=random.SystemRandom().getrandbits(62),
        layout=layout,
        canary_token_ids=canary.token_ids,
        dtype=config.model.dtype,
        hashes=inputs.hashes,
        max_length=config.task.max_prompt_tokens + config.rollout.max_new_tokens,
        vocabulary_size=inputs.vocabulary_size,
        temperature=config.rollout.temperature,
        reward=weighted_reward(config.task),
        software=importlib.metadata.version("offbeat"),
        max_message_bytes=config.hub.max_message_mb << 20,
        has_images=bool(config.task.image_field),
        sources=hash_sources(config.task.environment or config.task.reward),
        kit=make_kit(config, resolve_model(config.model.path), layout),
    )


def _make_listeners(
    hub: Hub, publisher: WeightPublisher, canary: Canary, watch: CalibrationWatch, health: HealthWatch, demand: Demand
) -> Listeners:
    def joined(peer: bytes, hello: Hello) -> None:
        publisher.joined(peer)
        canary.joined(hello.actor)
        watch.joined(hello)

    return Listeners(
        joined=joined,
        weights=publisher.handle,
        canary=canary.judge,
        files_scored=canary.measure_floor,
        routed=canary.compare_routing,
        distrusted=publisher.distrust,
        vitals=health.vitals,
        weight_problems=publisher.problems,
        advice=lambda: [demand.advice] if demand.advice else [],
        hub_rejections=lambda: _hub_rejections(hub),
    )


def _make_dispatcher(
    contract: Contract,
    run: _Run,
    inputs: _Inputs,
    listeners: Listeners,
    policy_version: int,
    record: Recorder,
    finish_evaluation: FinishEvaluation | None,
) -> Dispatcher:
    recovered = run.recovered
    journal = LeaseJournal(run.log, recovered.ledger, recovered.stream)
    versions = Versions(policy_version, recovered.newest_version)
    parts = make_parts(
        contract, run.settings, inputs.prompts, inputs.decode, journal, versions, record, finish_evaluation=finish_evaluation
    )
    return Dispatcher(parts, listeners)


def _make_evaluation_numbers(inputs: _Inputs, record: Recorder) -> EvaluationNumbers | None:
    function = inputs.own_evaluation
    return function and EvaluationNumbers(function, inputs.prompts.evaluation, inputs.decode_plain, record)


def _begin_curriculum(inputs: _Inputs, dispatcher: Dispatcher, policy_version: int, record: Recorder) -> Curriculum:
    num_prompts = Counter(prompt.task for prompt in inputs.prompts.train if prompt.task)
    curriculum = Curriculum(inputs.own_curriculum, num_prompts, dispatcher, record)
    curriculum.begin(policy_version)
    return curriculum


def _make_checkpoints(
    config: Config, identity: RunIdentity, run: _Run, trainer: RankedTrainer, dispatcher: Dispatcher, record: Recorder
) -> Checkpoints:
    return Checkpoints(
        Path(config.run.dir),
        trainer=trainer,
        dispatcher=dispatcher,
        auto_bound=run.auto_bound,
        identity=identity,
        keep=config.train.keep_checkpoints,
        record=record,
    )


def _load_prompts(config: Config, source: str, split: str, setting: str, tokenizer: Any) -> list[Prompt]:
    loaded = load_prompts(source, split, config.task, tokenizer, setting=setting)
    if loaded.num_dropped:
        level = logging.WARNING if loaded.share_dropped > MUCH_LEFT_OUT else logging.INFO
        logger.log(level, "%s: %s", setting, loaded.dropped_text())
    return loaded.prompts


def _max_peers(config: Config, hub: Hub) -> int:
    """Return how many actors the limit on open files leaves room for; warn when `hub.max_actors` are more."""
    if hub.max_peers < config.hub.max_actors:
        logger.warning(
            "this process may open too few files for hub.max_actors = %d: %d actors at most can join. Raise the limit of this "
            "machine (ulimit -Hn) to %d, or lower the setting",
            *(config.hub.max_actors, hub.max_peers, FILES_PER_PEER * config.hub.max_actors),
        )
    return hub.max_peers


def _hub_rejections(hub: Hub) -> dict[str, int]:
    """Return how many peers and messages the hub turned away, by reason; for the hub's thread."""
    connections = {
        "connections without an allowed key": hub.num_refused,
        "connections that said nothing, closed to make room": hub.num_closed,
    }
    return dict(hub.num_dropped) | {what: number for what, number in connections.items() if number}


def _transport(config: Config, device: torch.device, host: str) -> Transport:
    weights = config.weights
    if weights.backend == "nccl" and device.type != "cuda":
        problem = "the learner trains on a CPU, and NCCL needs a GPU"
        raise SettingError("weights.backend", "nccl", problem, 'Set weights.backend="auto".')
    gpu = LearnerGpu(device.index, gpu_uuid(device.index)) if device.type == "cuda" else None
    return Transport(
        host=host,
        listen_on=host_of(config.hub.bind or config.hub.address),
        backend=weights.backend if weights.backend != "auto" else "gloo" if gpu is None else "nccl",
        port=weights.port,
        timeout_s=weights.timeout_s,
        bucket_bytes=weights.bucket_mb << 20,
        chunk_bytes=weights.chunk_mb << 20,
        max_pulls=weights.max_pulls,
        delta=weights.delta,
        gpu=gpu,
    )
