"""The learner's wiring: every part is made here, in the order of use.

hub -> inputs -> run folder -> outlets -> trainer -> run as it was left -> canary, publisher -> dispatcher -> training loop
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from offbeat.common.processes.environment import launcher_rank
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import doing
from offbeat.common.records.rows import Recorder
from offbeat.common.settings.config import Config
from offbeat.learner.calibration.watch import watch_calibration
from offbeat.learner.curriculum import Curriculum
from offbeat.learner.diagnostics.own_evaluation import EvaluationNumbers
from offbeat.learner.diagnostics.routing_metrics import RoutingComparison
from offbeat.learner.diagnostics.sample_rows import SampleRows
from offbeat.learner.dispatch.canary import CANARY_TOKENS, Canary, canary_token_ids
from offbeat.learner.dispatch.dispatcher import Dispatcher, Listeners
from offbeat.learner.hub import ActorLink, HubThread, hub_rejections, max_peers, open_hub, open_weight_hub, publish_address
from offbeat.learner.inputs import Inputs, load_inputs, make_contract
from offbeat.learner.leases.demand import Demand, last_actor_hours
from offbeat.learner.reporting.outlets import HealthWatch, open_outlets
from offbeat.learner.reporting.step_rows import StepRows
from offbeat.learner.restart.resume import Checkpoints, RunState, mirroring, noting_evaluations, open_folder, restore
from offbeat.learner.service import Learner, RunOutcome, TrainingLoop
from offbeat.learner.training.ranks import RankedTrainer, naming_lost_ranks
from offbeat.learner.training.trainer import Scored, Trainer
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.transport import resolve_transport
from offbeat.protocols.channels import Hub

logger = logging.getLogger(__name__)

LOADING = "ended while the learner was loading"
"""The last words of a learner that a signal ends before it works."""


def run_learner(config: Config, stop: StopRequest, report_command: Sequence[str]) -> RunOutcome:
    """Train until `train.num_steps` or a signal; every rank of the learner calls this, rank 0 with the run's folder locked.

    `report_command` with a run's folder prints its report, for the live page.
    """
    started = time.monotonic()
    # Outermost: when rank 0 then ends the others' trainers, it meets the same loss again.
    with ExitStack() as stack, naming_lost_ranks():
        if launcher_rank() > 0:
            RankedTrainer(Trainer(config)).follow()
            return "finished"
        # Bound before the data is read: a port in use is reported at once.
        hub = stack.enter_context(open_hub(config))
        host = publish_address(config.hub.address, hub.address)
        with stop.at_once(LOADING), doing(logger, "reading data, tokenizer and weight files"):
            inputs = load_inputs(config)
        folder = open_folder(config, inputs.identity, inputs.prompt_hashes)
        inputs = inputs._replace(identity=folder.identity)
        outlets = stack.enter_context(open_outlets(config, stop, report_command))
        record = outlets.health.record
        stack.enter_context(mirroring(config.run, record))
        folder.report(record)
        with stop.at_once(LOADING), doing(logger, "loading the model"):
            learner = open_learner(config, inputs, hub, outlets.health, started, host=host)
            outlets.wait_loaded()
        with outlets.showing(config, learner.loop.dispatcher):
            return learner.run(stop)


def open_learner(config: Config, inputs: Inputs, hub: Hub, health: HealthWatch, started: float, *, host: str) -> Learner:
    """Make every part of rank 0: load the model, resume or begin the run, wire the services; nothing is running yet.

    `started` is when the learner's process began to load (monotonic); `host` is this machine, as actors reach it.
    """
    folder = Path(config.run.dir)
    record = noting_evaluations(folder, health.record)
    trainer = RankedTrainer(Trainer(config))
    prompts = [prompt.token_ids for prompt in inputs.prompts.train]
    canary_ids = canary_token_ids(prompts, min(CANARY_TOKENS, config.model.max_length - 1))
    # Before a checkpoint replaces the weights of the files: each actor scores these too, which measures its engine's noise.
    scored = trainer.score(canary_ids.tolist())
    layout, num_peers = trainer.layout(), max_peers(config, hub)
    contract = make_contract(
        config, inputs, layout=layout, canary_token_ids=canary_ids, routing=scored.routing, max_peers=num_peers
    )
    run = restore(config, inputs.identity.run_id, trainer, inputs.prompts.train, record)
    canary = _make_canary(run, canary_ids, scored, record)
    # Weights are published between batches only.
    publish_interval = max(config.weights.interval, config.train.batch_steps)
    routing = RoutingComparison(config.metrics.routing_interval, publish_interval, record)
    publisher = _make_publisher(run, trainer, host, record)
    watch = watch_calibration(config, inputs.calibration, inputs.hashes, trainer.device, record)
    demand = Demand(last_actor_hours(folder) if config.run.resume else 0.0)
    numbers = inputs.own_evaluation and EvaluationNumbers(
        inputs.own_evaluation, inputs.prompts.evaluation, inputs.decode_plain, record
    )

    listeners = Listeners(
        joined=publisher.joined,
        introduced=watch.joined,
        weights=publisher.handle,
        distrusted=publisher.distrust,
        routed=routing.compare,
        evaluated=numbers and numbers.finish,
        vitals=health.vitals,
        weight_problems=publisher.problems,
        advice=lambda: [demand.advice] if demand.advice else [],
        hub_rejections=lambda: hub_rejections(hub),
    )
    dispatcher = Dispatcher(contract, run.settings, inputs.prompts, run.journal, run.versions, canary, listeners, record)
    num_prompts = Counter(prompt.task for prompt in inputs.prompts.train if prompt.task)
    curriculum = Curriculum(inputs.own_curriculum, num_prompts, dispatcher, record)
    curriculum.begin(trainer.policy_version)
    samples = SampleRows(config.train.num_steps, inputs.prompts.decode, record)
    keep = config.train.keep_checkpoints
    checkpoints = Checkpoints(folder, trainer, dispatcher, run.auto_bound, inputs.identity, keep, record)
    step_rows = StepRows(dispatcher, run.auto_bound, demand, curriculum, samples, watch, record)
    loop = TrainingLoop(config, trainer, dispatcher, publisher, canary, routing, checkpoints, step_rows, hub.wake)
    logger.info("run %s in %s; hub at %s", inputs.identity.run_id, folder, hub.address)
    return Learner(
        loop,
        link=ActorLink(dispatcher, HubThread(hub, dispatcher), config.hub.dead_after_s),
        publisher=publisher,
        log=run.log,
        record=record,
        started=started,
        evaluation_numbers=numbers,
        curriculum=curriculum,
    )


def _make_canary(run: RunState, token_ids: np.ndarray, scored: Scored, record: Recorder) -> Canary:
    return Canary(
        token_ids,
        dtype=run.settings.config.model.dtype,
        file_logprobs=scored.logprobs,
        tolerance=lambda: run.settings.config.weights.canary_tolerance,
        record=record,
    )


def _make_publisher(run: RunState, trainer: RankedTrainer, host: str, record: Recorder) -> WeightPublisher:
    return WeightPublisher(
        layout=trainer.layout(),
        transport=resolve_transport(run.settings.config, trainer.device, host),
        open_hub=lambda: open_weight_hub(run.settings.config),
        max_pull_lag=lambda: run.settings.staleness.bounds.max_staleness,
        record=record,
    )
