"""Checks of the model folders: complete files of a model that can be trained as the settings ask."""

import ast
import functools
import importlib.util
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from offbeat.common.models.folders import config_obstacle, find_config
from offbeat.common.settings.config import Config
from offbeat.common.settings.library_options import SETTING, check_heads
from offbeat.deploy.checks.findings import Finding, findings_of, mistake
from offbeat.deploy.local.devices import find_gpus
from offbeat.deploy.local.model_sizes import EAGER_TYPES
from offbeat.deploy.local.plan import engine_here

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_INDEX = "model.safetensors.index.json"
Shapes = Mapping[str, Sequence[int]]
"""Shapes of a model's tensors, by name."""


class _DamagedError(Exception):
    """A file of the model cannot be used; the text says why."""


def check_model(config: Config) -> Iterator[Finding]:
    """Find mistakes about the policy's folder: its files, its positions, and the layers that an adapter names."""
    path = config.model.path
    found = yield from _check_folder("model.path", path)
    if Path(path).is_dir() and not any(Path(path, name).is_file() for name in _TOKENIZER_FILES):
        cure = "Save the tokenizer there: tokenizer.save_pretrained(FOLDER)."
        yield mistake("model.path", path, "the folder has no tokenizer", cure)
    if found is not None:
        fields, shapes = found
        text = _text_fields(fields)
        yield from _check_positions(config, text)
        yield from _check_packing(config, text)
        yield from findings_of(functools.partial(_check_heads, config, text))
        yield from _check_adapter(config, shapes)


def check_engine_model(config: Config) -> Iterator[Finding]:
    """Find a model that vLLM has no class for, or whose heads none of its kernels for GPUs takes."""
    if not config.model.path or engine_here(config) != "vllm":
        return
    try:
        fields = msgspec.json.decode(find_config(config.model.path) or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Found by the check of the folder.
        return
    yield from _check_architecture(config, fields)
    yield from _check_head_size(config, _text_fields(fields))
    yield from _check_linear_attention(config, _text_fields(fields))


@functools.cache
def known_architectures() -> set[str]:
    """Return the architectures that the installed vLLM has classes for.

    They are read from its source, because its import takes seconds.
    """
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "model_executor/models/registry.py").read_text(encoding="utf-8"))
    tables = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    parts = [tables[ast.unparse(part)] for part in tables["_VLLM_MODELS"].values]
    return {key.value for part in parts for key in part.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def _check_architecture(config: Config, fields: dict[str, Any]) -> Iterator[Finding]:
    """Find a model that vLLM would leave to transformers' class or refuse, unless the user has chosen transformers' class."""
    names = [str(name) for name in fields.get("architectures") or ()]
    # vLLM finds a missing name by the model's type.
    if not names or "model_impl" in config.actor.engine_options or not known_architectures().isdisjoint(names):
        return
    # A plugin may register others.
    if any(not one.value.startswith("vllm.") for one in entry_points(group="vllm.general_plugins")):
        return
    verb = "is" if config.actor.engine == "vllm" else "chooses"
    problem = f"it {verb} vLLM, whose version here has no class for {', '.join(names)}"
    cure = 'Set actor.engine="transformers", or actor.engine_options.model_impl="transformers" to try its class under vLLM.'
    yield mistake("actor.engine", config.actor.engine, problem, cure)


def check_reference(config: Config) -> Iterator[Finding]:
    """Find mistakes about the folder of the KL's reference."""
    kl = config.kl
    if kl.reference and (kl.loss_coef or kl.reward_coef):
        yield from _check_folder("kl.reference", kl.reference)


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of a model's config.json; raise `_DamagedError` for a bad file."""
    file = folder / "config.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise _DamagedError("the folder has no config.json" if not file.exists() else str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _DamagedError(f"config.json is no JSON object ({error})") from error


def _check_folder(setting: str, path: str) -> Generator[Finding, None, tuple[dict[str, Any], Shapes] | None]:
    """Find mistakes about a model's files; return its config and the shapes in its safetensors files.

    Returns None where there is no folder, or it has a file that cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        # `owner/name` may be on the Hugging Face Hub; what looks like a path, or begins with a folder that is here, cannot be.
        if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) is None or Path(folder.parts[0]).exists():
            problem = "this is a file" if folder.is_file() else "there is no such folder"
            yield mistake(setting, path, problem, "Give a model folder or a hub name (owner/name).")
        return None
    cure = "Give a folder in the Hugging Face layout, or copy the model again."
    try:
        fields = _read_config(folder)
        if "model_type" not in fields:
            yield mistake(setting, path, "config.json has no model_type", cure)
        files = _weight_files(folder)
        if not files:
            yield mistake(setting, path, "the folder has no weights", cure)
        return fields, dict(shape for file in files if file.suffix == ".safetensors" for shape in _read_header(file))
    except (_DamagedError, OSError) as error:
        yield mistake(setting, path, str(error), cure)
        return None


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights: those that the index names, else all; raise `_DamagedError` for one that is missing."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (OSError, msgspec.DecodeError) as error:
        raise _DamagedError(f"{_INDEX} cannot be read ({error})") from error
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise _DamagedError(f"{len(missing)} files of the weights are missing, the first is {missing[0]}")
    return [folder / name for name in sorted(names)]


class _Index(msgspec.Struct):
    weight_map: Mapping[str, str]


def _read_header(file: Path) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield name and shape of each tensor in a file; raise `_DamagedError` for one that is cut or has another header."""
    try:
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is no mapping
                yield name, tensors.get_slice(name).get_shape()
    except SafetensorError as error:
        raise _DamagedError(f"{file.name} is damaged ({error})") from error


def _text_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that describes the text's layers; all of it where the model has no other."""
    text = fields.get("text_config")
    return text if isinstance(text, dict) else fields


def _check_positions(config: Config, text: dict[str, Any]) -> Iterator[Finding]:
    positions = text.get("max_position_embeddings")
    # A model with scaled positions may be used beyond the length it states.
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    is_scaled = isinstance(scaling, dict) and "factor" in scaling
    if isinstance(positions, int) and not is_scaled and config.model.max_length > positions:
        problem = f"the model has {positions} positions"
        yield mistake("model.max_length", config.model.max_length, problem, f"Set model.max_length={positions} or less.")


def _check_packing(config: Config, text: dict[str, Any]) -> Iterator[Finding]:
    """Find ranks that are to share packs of a model without packs; what only its modules show is found when it is loaded."""
    obstacle = config_obstacle(text)
    size = config.train.sequence_parallel_size
    if obstacle is not None and size > 1:
        yield mistake(SETTING, size, f"ranks share packs, and the model cannot be packed: {obstacle}", "Set it to 1.")
    elif obstacle is not None:
        note = f"the model is not packed, because {obstacle}: each completion is computed in a row of its own with its prompt"
        yield Finding("note", note)


def _check_heads(config: Config, text: dict[str, Any]) -> None:
    num_heads = text.get("num_attention_heads")
    num_key_heads = text.get("num_key_value_heads") or num_heads
    if isinstance(num_heads, int) and isinstance(num_key_heads, int):
        check_heads(config.train.sequence_parallel_size, num_heads=num_heads, num_key_heads=num_key_heads)


SMALLEST_FLOAT32_HEAD = 16
"""Least numbers in a head that vLLM attends with in float32 on a GPU, by FlexAttention, whose products torch has from 16."""
SMALLEST_TRITON_HEAD = 32
"""Least numbers in a head of vLLM's Triton kernel, which alone has soft caps and sinks in float32."""
LINEAR_HEADS = ((64, 64), (128, 128))
"""Numbers of a key and of a value in the heads of linear attention that vLLM's kernel for CPUs takes."""


def _check_head_size(config: Config, text: dict[str, Any]) -> Iterator[Finding]:
    """Find heads of a float32 model that are too small for vLLM on this machine's GPUs. Latent attention has other kernels."""
    hidden, num_heads = text.get("hidden_size"), text.get("num_attention_heads")
    if config.model.dtype != "float32" or text.get("kv_lora_rank"):
        return
    if not isinstance(hidden, int) or not isinstance(num_heads, int) or num_heads < 1:
        return
    head = text.get("head_dim")
    size = head if isinstance(head, int) else hidden // num_heads
    needs_triton = text.get("attn_logit_softcapping") is not None or text.get("model_type") in EAGER_TYPES
    least = SMALLEST_TRITON_HEAD if needs_triton else SMALLEST_FLOAT32_HEAD
    if size < least and find_gpus().gpus:
        problem = f"the model's attention heads have {size} numbers, and on a GPU vLLM computes in float32 with {least} or more"
        yield mistake("model.dtype", "float32", problem, 'Set model.dtype="bfloat16" or actor.engine="transformers".')


def _check_linear_attention(config: Config, text: dict[str, Any]) -> Iterator[Finding]:
    """Find linear attention that vLLM's kernel for CPUs does not compute."""
    if "linear_key_head_dim" not in text or find_gpus().gpus:
        return
    sizes = (text["linear_key_head_dim"], text.get("linear_value_head_dim"))
    problem = "the model has linear attention, which vLLM computes on a CPU"
    if config.model.dtype != "bfloat16":
        cure = 'Set model.dtype="bfloat16" or actor.engine="transformers".'
        yield mistake("model.dtype", config.model.dtype, f"{problem} in bfloat16 only", cure)
    elif sizes not in LINEAR_HEADS:
        problem = f"{problem} with 64 or 128 numbers in each head; this one's keys have {sizes[0]} and its values {sizes[1]}"
        yield mistake("actor.engine", config.actor.engine, problem, 'Set actor.engine="transformers".')


def _check_adapter(config: Config, shapes: Shapes) -> Iterator[Finding]:
    lora = config.lora
    if not lora.rank:
        return
    layers = [name.removesuffix(".weight") for name, shape in shapes.items() if _is_linear(name, shape)]
    if not layers:
        return
    for target in lora.target_modules:
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers):
            there = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
            problem = f"{target!r} fits no linear layer of the model"
            yield mistake("lora.target_modules", lora.target_modules, problem, f"There are: {there}.")


def _is_linear(tensor: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is a linear layer's weight; embeddings and the output head get no adapter."""
    name = tensor.removesuffix(".weight")
    is_left_out = re.search(r"(^|\.)(lm_head|\w*embed\w*|wte|wpe)$", name) is not None
    return len(shape) == 2 and name != tensor and not is_left_out
