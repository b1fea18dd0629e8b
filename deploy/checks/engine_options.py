"""Checks of `actor.engine_options` against the options that the engine's source declares; no engine is imported."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from offbeat.actor.engines.reserved_options import RESERVED
from offbeat.common.settings.config import Config
from offbeat.deploy.checks.findings import Finding, mistake

_DECLARATIONS = {
    "vllm": ("engine/arg_utils.py", "EngineArgs"),
    "transformers": ("generation/configuration_utils.py", "ContinuousBatchingConfig"),
}
"""The file and class, by package, whose fields are the engine's options."""
_SIMPLE = {"int": int, "float": (int, float), "str": str, "bool": bool}


def check_engine_options(config: Config) -> Iterator[Finding]:
    """Find options that are unknown or not for users, values of a wrong type, and an engine that is not installed."""
    name = config.actor.engine
    has_vllm = importlib.util.find_spec("vllm") is not None
    if name == "vllm" and not has_vllm:
        cure = 'Install offbeat[cpu] or offbeat[cuda], or set it to "transformers".'
        yield mistake("actor.engine", name, "vLLM is not installed", cure)
        return
    if not config.actor.engine_options:
        return
    engine = "vllm" if has_vllm and name != "transformers" else "transformers"
    declared = declared_options(engine)
    for option, value in config.actor.engine_options.items():
        setting = f"actor.engine_options.{option}"
        if option in RESERVED[engine]:
            yield mistake(setting, value, f"this is not an option, because {RESERVED[engine][option]}", "Remove it.")
        elif option not in declared:
            yield mistake(setting, value, "the engine has no such option", "Remove it or correct its name.")
        elif not _fits(value, declared[option]):
            yield mistake(setting, value, f"the engine wants {' or '.join(sorted(declared[option]))}", "Give such a value.")


def declared_options(package: str) -> dict[str, set[str]]:
    """Return the names in the annotation of each option of an engine's package; none where its source is not as expected."""
    file, class_name = _DECLARATIONS[package]
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return {
        node.target.id: {part.strip() for part in ast.unparse(node.annotation).split("|")}
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _fits(value: object, annotation: set[str]) -> bool:
    """Return False only where the annotation is made of simple types and the value is of none of them."""
    kinds = annotation - {"None"}
    if not kinds or not kinds <= set(_SIMPLE):
        return True
    if isinstance(value, bool):
        return "bool" in kinds
    return any(isinstance(value, _SIMPLE[kind]) for kind in kinds)
