"""The model folder: where `model.path` leads, and the hash by which two services know that they have the same one."""

import hashlib
from pathlib import Path

CONTRACT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What must be equal at learner and actor. Weights are not among them: the learner sends its own."""


def resolve_model(path: str) -> Path:
    """The local folder of `model.path`: itself, or the hub's snapshot of that name, downloaded if need be."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download  # 0.3 s, and only needed for hub names

    return Path(snapshot_download(path, ignore_patterns=["*.pth", "*.bin", "*.gguf", "original/*"]))


def model_hash(folder: Path) -> str:
    """Hash of the model's config and tokenizer: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in CONTRACT_FILES:
        file = folder / name
        digest.update(name.encode() + b"\0")
        digest.update(file.read_bytes() if file.exists() else b"")
    return digest.hexdigest()[:16]
