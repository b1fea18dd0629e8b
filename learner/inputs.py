"""The files that a run reads and never changes; what actors must share of them, and what they are sent."""

import importlib.metadata
import logging
import random
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.common.errors import SettingError
from offbeat.common.models import folders
from offbeat.common.models.routing import Routing
from offbeat.common.settings.config import Config, LaunchSection, environment_of
from offbeat.common.settings.loading import replace_settings, resolved_toml, setting_text, weighted_reward
from offbeat.common.user_code.functions import hash_sources
from offbeat.learner.calibration.calibration import Calibration, load_calibration
from offbeat.learner.curriculum import OwnCurriculum
from offbeat.learner.diagnostics.own_evaluation import OwnEvaluation, load_evaluation
from offbeat.learner.diagnostics.sample_rows import Decode
from offbeat.learner.dispatch.contract import Contract, JoinPayload, expert_limits
from offbeat.learner.leases.prompts import MUCH_LEFT_OUT, Prompt, Prompts, load_held_out, load_prompts
from offbeat.learner.restart.run_identity import PromptHashes, RunIdentity, hash_prompts, make_identity
from offbeat.protocols.message_parts import JoinSettings, JoinSettingsError, ModelHashes, encode_join_settings
from offbeat.protocols.messages import TensorSpec

logger = logging.getLogger(__name__)


class Inputs(NamedTuple):
    """Everything that `load_inputs` reads."""

    identity: RunIdentity
    """The run's, still without its id."""
    prompt_hashes: PromptHashes
    """The hashes of the training prompts."""
    prompts: Prompts
    model: Path
    """The folder of `model.path`."""
    decode_plain: Decode
    """Returns text without special tokens."""
    own_evaluation: OwnEvaluation | None
    own_curriculum: OwnCurriculum | None
    hashes: ModelHashes
    vocabulary_size: int
    calibration: Calibration | None


def load_inputs(config: Config) -> Inputs:
    """Read the files that the settings name; raise `SettingError` where one cannot be used."""
    data = config.data
    model = folders.resolve_model(config.model.path)
    hashes = folders.hash_model(model)
    tokenizer = folders.load_tokenizer(model)
    vocabulary_size = folders.load_vocabulary_size(model, tokenizer)
    if config.kl.reference:
        obstacle = folders.reference_obstacle(tokenizer, folders.resolve_model(config.kl.reference, "kl.reference"))
        if obstacle is not None:
            raise SettingError("kl.reference", config.kl.reference, *obstacle)
    calibration = load_calibration(config.loss.noise_floor) if config.loss.noise_floor else None
    train = _load_prompts(config, data.train_data, data.train_split, "data.train_data", tokenizer)
    held_out = load_held_out(
        data,
        config.evaluation.num_prompts,
        lambda setting, source: _load_prompts(config, source, data.eval_split, setting, tokenizer),
    )
    prompt_hashes = hash_prompts(train)
    return Inputs(
        identity=make_identity(config, hashes, prompt_hashes, hash_prompts(held_out)),
        prompt_hashes=prompt_hashes,
        model=model,
        prompts=Prompts(train, held_out, tokenizer.decode),
        decode_plain=partial(tokenizer.decode, skip_special_tokens=True),
        own_evaluation=load_evaluation(config.evaluation.function) if config.evaluation.function else None,
        own_curriculum=OwnCurriculum(data.curriculum) if data.curriculum else None,
        hashes=hashes,
        vocabulary_size=vocabulary_size,
        calibration=calibration,
    )


def _load_prompts(config: Config, source: str, split: str, setting: str, tokenizer: Any) -> list[Prompt]:
    loaded = load_prompts(source, split, config.data, tokenizer, environment=environment_of(config), setting=setting)
    if loaded.num_dropped:
        level = logging.WARNING if loaded.share_dropped > MUCH_LEFT_OUT else logging.INFO
        logger.log(level, "%s: %s", setting, loaded.dropped_text())
    if unknown := loaded.unknown_text(tokenizer):
        logger.warning("%s: %s", setting, unknown)
    return loaded.prompts


def make_contract(
    config: Config,
    inputs: Inputs,
    *,
    layout: tuple[TensorSpec, ...],
    canary_token_ids: NDArray[np.int32],
    routing: Routing | None,
    max_peers: int | None,
) -> Contract:
    """Return the contract of this learner process; `routing` is one of the run's model, None for a dense model.

    Raises `SettingError` as `expert_limits` does.
    """
    return Contract(
        run_id=inputs.identity.run_id,
        learner_incarnation=random.SystemRandom().getrandbits(62),
        layout=layout,
        canary_token_ids=canary_token_ids,
        dtype=config.model.dtype,
        hashes=inputs.hashes,
        max_length=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        vocabulary_size=inputs.vocabulary_size,
        temperature=config.rollout.temperature,
        reward=weighted_reward(config.task),
        software=importlib.metadata.version("offbeat"),
        max_message_bytes=config.hub.max_message_mb << 20,
        max_peers=max_peers,
        experts=expert_limits(config, routing),
        has_images=bool(config.data.image_field),
        sources=hash_sources(config.task.environment or config.task.reward),
        join_payload=make_join_payload(config, inputs.model, layout),
    )


OF_THIS_MACHINE = (
    *("run.dir", "run.resume", "run.mirror", "model.path", "data.train_data", "data.eval_data", "judge.cache", "kl.reference"),
    *("loss.noise_floor", "hub.address", "hub.bind", "hub.key", "hub.learner_key", "hub.allowed_keys", "train.deepspeed"),
    *("metrics.bind", "metrics.wandb_project", "metrics.mlflow_experiment", "metrics.trackio_project", "metrics.callback"),
    *("actor.name", "environment.python", "environment.requirements"),
    *(f"launch.{name}" for name in LaunchSection.__struct_fields__),
)
"""Settings that are not handed out: paths, addresses, devices and processes of the learner's machine. An actor has its own, or
none."""


def make_join_payload(config: Config, model: Path, layout: tuple[TensorSpec, ...]) -> JoinPayload:
    """Return the run for `offbeat actor --join`, or why there is none; `model` is the folder of `model.path`."""
    obstacle = _obstacle(model, layout, has_images=bool(config.data.image_field))
    if obstacle is None:
        settings = JoinSettings(
            importlib.metadata.version("offbeat"), resolved_toml(without_this_machine(config)), folders.small_files(model)
        )
        try:
            return JoinPayload(encode_join_settings(settings))
        except JoinSettingsError as error:
            obstacle = str(error)
    logger.info("no actor can join without the model's folder: %s", obstacle)
    return JoinPayload(b"", f"{obstacle}. Give the actor the model's folder and the settings: offbeat actor run.toml")


def without_this_machine(config: Config) -> Config:
    """Return the settings with the defaults of those in `OF_THIS_MACHINE`."""
    plain = Config()
    return replace_settings(config, {setting: setting_text(plain, setting) for setting in OF_THIS_MACHINE})


def _obstacle(model: Path, layout: tuple[TensorSpec, ...], *, has_images: bool) -> str | None:
    """Return why the model's config and the weights of an update do not make the whole model; None where they do."""
    made = folders.make_without_weights(model, has_images=has_images)
    state = made.state_dict().keys()
    buffers = [name for name, _ in made.named_buffers() if name in state]
    if buffers:
        return f"the model has {buffers[0]}, a tensor that its files bring and updates do not"
    unlike = {name for name, _ in made.named_parameters()} ^ {spec.name for spec in layout}
    if unlike:
        # For example an output head that is tied in the config, and not in the files.
        return f"the model's files and its config differ in {min(unlike)}"
    return None
