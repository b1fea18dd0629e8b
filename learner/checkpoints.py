"""Checkpoint folders: their names, which one is newest, and that a half-written one is never taken."""

import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"step-(\d+)")


def checkpoint_folder(root: Path, policy_version: int) -> Path:
    """Where the checkpoint of this version belongs."""
    return root / f"step-{policy_version:08d}"


def partial_folder(folder: Path) -> Path:
    """Where the checkpoint is written until it is whole: a name that `newest` does not know."""
    return folder.with_name(folder.name + ".partial")


def publish(folder: Path) -> None:
    """Give the finished `partial_folder(folder)` its name, in place of an older checkpoint of the same name."""
    partial = partial_folder(folder)
    # On disk before it has the name: after a power failure a whole name must mean whole files.
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if folder.exists():
        _delete(folder)
    partial.rename(folder)
    _sync(folder.parent)


def newest(root: Path) -> Path | None:
    """The whole checkpoint of the highest version; None when there is none."""
    return max(_whole(root), default=None)


def prune(root: Path, *, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints, and what earlier deaths left half-written."""
    for folder in sorted(_whole(root))[:-keep]:
        _delete(folder)
    for folder in root.glob("step-*.partial"):
        shutil.rmtree(folder)


def _whole(root: Path) -> list[Path]:
    return [folder for folder in root.glob("step-*") if _NAME.fullmatch(folder.name)]


def _delete(folder: Path) -> None:
    # Renamed first: a death in the middle must not leave half a checkpoint under a whole one's name.
    doomed = folder.with_name(folder.name + ".deleted.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
