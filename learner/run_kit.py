"""The run as it is handed to actors that have neither its settings nor its model: what they get, and what they never get."""

import importlib.metadata
import logging
from pathlib import Path

import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from offbeat.common.models.folders import small_files
from offbeat.common.settings.config import Config, LaunchSection
from offbeat.common.settings.loading import resolved_toml, setting_value
from offbeat.learner.dispatch.handout import Kit
from offbeat.protocols.message_parts import RunKit, RunKitError, encode_kit
from offbeat.protocols.messages import TensorSpec

logger = logging.getLogger(__name__)

OF_THIS_MACHINE = (
    *("run.dir", "run.resume", "run.mirror", "model.path", "task.train_data", "task.eval_data", "judge.cache", "kl.reference"),
    *("loss.noise_floor", "hub.address", "hub.bind", "hub.key", "hub.learner_key", "hub.allowed_keys", "train.deepspeed"),
    *("metrics.bind", "metrics.wandb_project", "metrics.mlflow_experiment", "metrics.trackio_project", "metrics.callback"),
    "actor.name",
    *(f"launch.{name}" for name in LaunchSection.__struct_fields__),
)
"""Settings that are not handed out: paths, addresses, devices and processes of the learner's machine. An actor has its own, or
none."""


def make_kit(config: Config, model: Path, layout: tuple[TensorSpec, ...]) -> Kit:
    """Return the run for `offbeat actor --join`, or why there is none; `model` is the folder of `model.path`."""
    obstacle = _obstacle(model, layout, has_images=bool(config.task.image_field))
    if obstacle is None:
        kit = RunKit(importlib.metadata.version("offbeat"), resolved_toml(without_this_machine(config)), small_files(model))
        try:
            return Kit(encode_kit(kit))
        except RunKitError as error:
            obstacle = str(error)
    logger.info("no actor can join without the model's folder: %s", obstacle)
    return Kit(b"", f"{obstacle}. Give the actor the model's folder and the settings: offbeat actor run.toml")


def without_this_machine(config: Config) -> Config:
    """Return the settings with the defaults of those in `OF_THIS_MACHINE`."""
    plain = Config()
    values: dict[str, dict[str, object]] = {}
    for setting in OF_THIS_MACHINE:
        section, _, key = setting.partition(".")
        values.setdefault(section, {})[key] = setting_value(plain, setting)
    return replace(config, **{section: replace(getattr(config, section), **keys) for section, keys in values.items()})


def _obstacle(model: Path, layout: tuple[TensorSpec, ...], *, has_images: bool) -> str | None:
    """Return why the model's config and the weights of an update do not make the whole model; None where they do."""
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    with torch.device("meta"):
        made = kind.from_config(AutoConfig.from_pretrained(model))
    state = made.state_dict().keys()
    buffers = [name for name, _ in made.named_buffers() if name in state]
    if buffers:
        return f"the model has {buffers[0]}, a tensor that its files bring and updates do not"
    unlike = {name for name, _ in made.named_parameters()} ^ {spec.name for spec in layout}
    if unlike:
        # For example an output head that is tied in the config, and not in the files.
        return f"the model's files and its config differ in {min(unlike)}"
    return None
