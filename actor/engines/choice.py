"""The choice of the engine that an actor samples with."""

import importlib.util
from typing import TYPE_CHECKING, Literal

from offbeat.actor.engines.engine import Engine, EngineSettings
from offbeat.common.errors import SettingError
from offbeat.common.processes.environment import fast_imports

if TYPE_CHECKING:
    from offbeat.actor.engines.transformers_engine import TransformersEngine
    from offbeat.actor.engines.vllm_engine import VllmEngine


def make_engine(name: Literal["auto", "vllm", "transformers"], model_path: str, settings: EngineSettings) -> Engine:
    """Return the engine of this `actor.engine` setting, with the model loaded; `auto` takes vLLM where it is installed."""
    chosen = engine_class(name)
    if settings.images is not None and chosen.__name__ != "VllmEngine":
        problem = "prompts have images, which only vLLM takes"
        raise SettingError("actor.engine", name, problem, "Install offbeat[cpu] or offbeat[cuda], or remove data.image_field.")
    return chosen(model_path, settings)


def engine_class(name: Literal["auto", "vllm", "transformers"]) -> "type[VllmEngine] | type[TransformersEngine]":
    """Return the class of this `actor.engine` setting.

    The engines are imported here: either import takes seconds, and vLLM need not be installed.
    """
    if name == "auto":
        name = "vllm" if _is_vllm_installed() else "transformers"
    if name == "vllm" and not _is_vllm_installed():
        raise SettingError(
            "actor.engine", name, "vLLM is not installed", 'Install offbeat[cpu] or offbeat[cuda], or set it to "transformers".'
        )
    with fast_imports():
        if name == "vllm":
            from offbeat.actor.engines.vllm_engine import VllmEngine as ChosenEngine
        else:
            from offbeat.actor.engines.transformers_engine import TransformersEngine as ChosenEngine
    return ChosenEngine


def _is_vllm_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None
