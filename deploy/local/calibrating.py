"""`offbeat calibrate`: measures the noise between a config's engine and learner at lag 0, to recommend a clip band above it.

one step of training, all groups leased under version 0  ->  rollout log
rollout log  ->  scored by the learner that the config makes  ->  `offbeat.lab.calibration`
"""

import logging
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from offbeat.common.errors import SettingError, SeveralSettingsError
from offbeat.common.processes.environment import prepare_environment
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.run_folder import LOG, MODEL
from offbeat.common.settings.config import Config, StalenessSection
from offbeat.deploy.local.devices import VISIBLE
from offbeat.deploy.local.forks import choose_starts
from offbeat.deploy.local.launcher import Launcher, free_port
from offbeat.deploy.local.plan import plan_of_this_machine
from offbeat.lab.calibration import ScoredHalves, check_source, engine_of, fit_calibration, load_groups
from offbeat.learner.calibration.calibration import Calibration
from offbeat.learner.calibration.noise_floor import Differences

logger = logging.getLogger(__name__)


def collection_config(config: Config, num_groups: int) -> Config:
    """Return the config of a run that samples `num_groups` groups under version 0: `config` with one step, on this machine.

    Groups and log-probs do not depend on the anchor. With `behavior`, the run's one step also records the clip fraction.
    """
    return replace(
        config,
        # The mirror is the run's own.
        run=replace(config.run, mirror=""),
        staleness=StalenessSection(max_staleness=0),
        loss=replace(
            config.loss,
            anchor="behavior",
            correction="none",
            normalize_correction=False,
            # Groups of equal rewards have noise like any other: keep them.
            zero_variance="count",
            noise_floor="",
            # What is recomputed is so for the anchor that was replaced.
            routing_replay="off" if config.loss.routing_replay == "recomputed" else config.loss.routing_replay,
        ),
        critic=replace(config.critic, alone_until=0),
        train=replace(
            config.train,
            num_steps=1,
            groups_per_step=num_groups,
            steps_per_batch=1,
            epochs_per_batch=1,
            warmup_steps=0,
            checkpoint_interval=0,
        ),
        hub=replace(config.hub, address="tcp://127.0.0.1:0", bind="", key="", learner_key="", allowed_keys=""),
        log=replace(config.log, enabled=True),
        weights=replace(config.weights, interval=1),
        data=replace(config.data, eval_data=""),
        evaluation=replace(config.evaluation, interval=0, function=""),
        metrics=replace(
            config.metrics, tensorboard=False, wandb_project="", mlflow_experiment="", trackio_project="", routing_interval=0
        ),
    )


def collect(config: Config, num_groups: int, stop: StopRequest) -> int:
    """Sample the groups into `run.dir` with real services; return the exit status of the run."""
    collected = collection_config(config, num_groups)
    plan, _ = plan_of_this_machine(collected)
    status = Launcher(collected, stop, choose_starts(collected), plan=plan).run()
    # The model is not needed after its one step.
    shutil.rmtree(Path(config.run.dir) / MODEL, ignore_errors=True)
    return status


def calibrate(config: Config, source: Path) -> Calibration:
    """Score the groups of version 0 in the log of the run in `source`, with the learner that `config` makes.

    Any run will do whose rollouts began at the same model, so that other settings of the learner can be tried on the same
    tokens. `SettingError` for a run of another model or temperature, of several engines, or without a rollout log.
    """
    if not (source / LOG).is_dir():
        raise SettingError("RUN", str(source), "it has no rollout log", "Calibrate without --reuse.")
    engine = engine_of(source)
    check_source(config, source, engine)
    return fit_calibration(config, engine, _score_in_processes(config, source))


def _score_in_processes(config: Config, source: Path) -> ScoredHalves:
    """Score the log's groups in the learner's number of processes: fewer may not hold the model."""
    # Imported here: torch takes seconds, and the command's checks come first.
    import torch
    from torch.multiprocessing.spawn import ProcessRaisedException, spawn

    config = replace(config, loss=replace(config.loss, noise_floor=""))
    num_processes = config.launch.learner_processes
    plan, _ = plan_of_this_machine(config)
    gpus = None if plan is None else plan.entries(plan.learner)
    port = free_port("127.0.0.1") if num_processes > 1 else 0
    logger.info("scoring the groups in %s", source)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "measured.npz"
        try:
            spawn(_score, (config, source, port, gpus, result), nprocs=num_processes)
        except ProcessRaisedException as error:
            mistake = _mistake_file(result, error.error_index)
            if mistake.exists():
                raise SeveralSettingsError([mistake.read_text()]) from None
            raise
        with np.load(result) as arrays:
            num_groups = int(arrays["num_groups"])
            if num_groups < 2:
                problem = f"its log has {num_groups} groups that were sampled under version 0 alone"
                raise SettingError("RUN", str(source), problem, "Two are the least: calibrate without --reuse.")
            first, second = (Differences(*(arrays[f"{half}{name}"] for name in Differences._fields)) for half in "ab")
            return ScoredHalves((first, second), num_groups, torch.device(str(arrays["device"])))


def _mistake_file(result: Path, rank: int) -> Path:
    """Return the file for the text of a `SettingError` in one of the learner's processes."""
    return result.with_name(f"mistake-{rank}")


def _score(rank: int, config: Config, source: Path, port: int, gpus: str | None, result: Path) -> None:
    """Score the groups as one of the learner's processes, which see these `gpus`; rank 0 writes `result`.

    Each process writes its own mistake.
    """
    try:
        _score_halves(rank, config, source, port, gpus, result)
    except SettingError as error:
        _mistake_file(result, rank).write_text("\n".join(error.texts))
        raise


def _score_halves(rank: int, config: Config, source: Path, port: int, gpus: str | None, result: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(config.launch.learner_processes)}
    if port:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if gpus is not None:
        os.environ[VISIBLE] = gpus
    prepare_environment()
    from offbeat.learner.training.trainer import Trainer

    groups = load_groups(source)
    if len(groups) < 2:
        if rank == 0:
            np.savez(result, num_groups=len(groups))
        return
    trainer = Trainer(config)
    halves = {"a": trainer.compare(groups[::2]), "b": trainer.compare(groups[1::2])}
    if rank == 0:
        arrays = {f"{half}{name}": array for half, of_half in halves.items() for name, array in of_half._asdict().items()}
        np.savez(result, num_groups=len(groups), device=str(trainer.device), **arrays)
    trainer.close()
