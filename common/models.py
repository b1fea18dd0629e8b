"""The model folder: where `model.path` leads, and the hash by which two services know that they have the same one."""

import hashlib
from pathlib import Path

from common.settings import SettingError

CONTRACT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What must be equal at learner and actor. Weights are not among them: the learner sends its own."""


def resolve_model(path: str) -> Path:
    """The local folder of `model.path`: itself, or the hub's snapshot of that name, downloaded if need be."""
    if Path(path).is_dir():
        return Path(path)
    # Takes 0.3 s to import, and is only needed for hub names.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, ignore_patterns=["*.pth", "*.bin", "*.gguf", "original/*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise SettingError(
            "model.path",
            path,
            f"it is no folder here, and the model hub did not give it ({str(error).splitlines()[0]})",
            "Give a model folder, or a hub name on a machine that reaches the hub.",
        ) from error


def model_hash(folder: Path) -> str:
    """Hash of the model's config and tokenizer: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in CONTRACT_FILES:
        file = folder / name
        digest.update(name.encode() + b"\0")
        digest.update(file.read_bytes() if file.exists() else b"")
    return digest.hexdigest()[:16]
