"""Settings and software of all learner ranks, compared at the start: on several machines each rank reads its own files."""

import importlib.metadata
from collections.abc import Mapping

import torch
import xxhash

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import setting_names, setting_text
from offbeat.learner.policy.process_group import gather_tensors

SECTIONS = ("model", "rollout", "loss", "advantage", "reward", "kl", "critic", "lora", "train")
"""The sections that every rank computes with."""
PATHS = ("model.path", "kl.reference", "loss.noise_floor")
"""Settings that may differ between machines."""
PACKAGES = ("offbeat", "torch", "deepspeed", "transformers")


def require_same_settings(config: Config) -> None:
    """Raise `SettingError` on every rank where one has other software or settings than rank 0; a collective.

    Ranks that compute differently would train a wrong model, or wait for each other in different collectives.
    """
    # First: other versions may have other settings.
    _compare(
        {f"package {name}": importlib.metadata.version(name) for name in PACKAGES}, "Install the same versions everywhere."
    )
    names = [name for name in setting_names() if name.partition(".")[0] in SECTIONS and name not in PATHS]
    cure = "Give all machines of the learner the same settings."
    _compare({name: setting_text(config, name) for name in ["run.seed", *names]}, cure)


def _compare(values: Mapping[str, str], cure: str) -> None:
    digests = gather_tensors(torch.tensor([xxhash.xxh3_64_intdigest(value.encode()) >> 1 for value in values.values()]))
    for index, (name, value) in enumerate(values.items()):
        others = [rank for rank, digest in enumerate(digests[:, index]) if digest != digests[0, index]]
        if others:
            raise SettingError(name, value, f"learner ranks 0 and {others[0]} have different values", cure)
