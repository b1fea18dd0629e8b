"""Checkpoint folders: names, order, and a publishing step that never shows a half-written one."""

import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"step-(\d+)")
_EXTRA_FILE = "extra.bin"


class NoRoomError(OSError):
    """The disk is too full for a checkpoint. Earlier checkpoints are whole."""


def write_extra(partial: Path, extra: bytes) -> None:
    """Add the caller's bytes to an unfinished checkpoint."""
    (partial / _EXTRA_FILE).write_bytes(extra)


def read_extra(folder: Path) -> bytes:
    """Return the bytes that `write_extra` wrote."""
    return (folder / _EXTRA_FILE).read_bytes()


def require_room(root: Path, num_bytes: int) -> None:
    """Raise `NoRoomError` unless the disk has `num_bytes` free. Call it before any rank begins to write."""
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < num_bytes:
        raise NoRoomError(f"it takes about {num_bytes >> 20} MB, and {free >> 20} MB are free")


def checkpoint_folder(root: Path, policy_version: int) -> Path:
    """Return the folder of the checkpoint of this version."""
    return root / f"step-{policy_version:08d}"


def partial_folder(folder: Path) -> Path:
    """Return the folder that the checkpoint is written to until it is whole; `newest` ignores its name."""
    return folder.with_name(folder.name + ".partial")


def publish(folder: Path) -> None:
    """Rename the finished `partial_folder(folder)` to `folder`, replacing an older checkpoint of that name."""
    partial = partial_folder(folder)
    # Synced before the rename, so that a complete name means complete files even after a power failure.
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if folder.exists():
        _delete(folder)
    partial.rename(folder)
    _sync(folder.parent)


def whole(root: Path) -> list[Path]:
    """Return all whole checkpoints, in no order."""
    return [folder for folder in root.glob("step-*") if _NAME.fullmatch(folder.name)]


def newest(root: Path) -> Path | None:
    """Return the whole checkpoint of the highest version; None when there is none."""
    return max(whole(root), default=None)


def prune(root: Path, *, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints, and the half-written ones that killed processes left."""
    for folder in sorted(whole(root))[:-keep]:
        _delete(folder)
    for folder in root.glob("step-*.partial"):
        shutil.rmtree(folder)


def _delete(folder: Path) -> None:
    # Renamed first, so that a kill in between leaves no partial checkpoint under a complete one's name.
    doomed = folder.with_name(folder.name + ".deleted.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
