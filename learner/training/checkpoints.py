"""Checkpoint folders: names, order, checksums, and a publishing step that never shows a half-written one.

step-00000040/            whole: renamed into place after all of its files are on disk
step-00000050.partial/    being written, or left by a killed process
step-00000030.damaged/    its files are not those of its manifest; kept for people, never loaded
"""

import hashlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
import xxhash

from offbeat.common.processes.files import replace, sync

_NAME = re.compile(r"step-(\d+)")
_EXTRA_FILE = "extra.bin"
_MANIFEST_FILE = "manifest.json"
EVALUATIONS_FILE = "evaluations.json"
BYTES_PER_PARAMETER = 16
"""Most bytes of a trained parameter in a checkpoint: weights in two precisions at most, and AdamW's two moments."""


class CheckpointFailedError(OSError):
    """A checkpoint could not be written. Nothing of it is left; earlier checkpoints are whole."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as it was written."""

    num_bytes: int
    xxh3: str
    """XXH3, 64 bits, in hexadecimal digits."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All other files of a checkpoint, by their paths in it; written last."""

    files: dict[str, FileEntry]


def write_extra(partial: Path, extra: bytes) -> None:
    """Add the caller's bytes to an unfinished checkpoint."""
    (partial / _EXTRA_FILE).write_bytes(extra)


def read_extra(folder: Path) -> bytes:
    """Return the bytes that `write_extra` wrote."""
    return (folder / _EXTRA_FILE).read_bytes()


def require_room(root: Path, num_bytes: int) -> None:
    """Raise `CheckpointFailedError` unless the disk has `num_bytes` free. Call it before any rank begins to write."""
    try:
        # Not the run's folder: a run that was moved away must not begin another one at its old place.
        root.mkdir(exist_ok=True)
        free = shutil.disk_usage(root).free
    except OSError as error:
        raise CheckpointFailedError(str(error)) from error
    if free < num_bytes:
        raise CheckpointFailedError(f"it takes about {num_bytes >> 20} MB, and {free >> 20} MB are free")


def checkpoint_folder(root: Path, policy_version: int) -> Path:
    """Return the folder of the checkpoint of this version."""
    return root / f"step-{policy_version:08d}"


def manifest(folder: Path) -> Path:
    """Return the file of a checkpoint that was written last."""
    return folder / _MANIFEST_FILE


def version_of(folder: Path) -> int:
    """Return the policy version of a whole checkpoint."""
    return int(folder.name.rpartition("-")[2])


def partial_folder(folder: Path) -> Path:
    """Return the folder that the checkpoint is written to until it is whole; `newest` ignores its name."""
    return folder.with_name(folder.name + ".partial")


def publish(folder: Path) -> None:
    """Add the manifest to the finished `partial_folder(folder)`, and `put_in_place`."""
    partial = partial_folder(folder)
    files = {path.relative_to(partial).as_posix(): _describe(path) for path in sorted(partial.rglob("*")) if path.is_file()}
    (partial / _MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(Manifest(files))))
    put_in_place(folder)


def put_in_place(folder: Path) -> None:
    """Rename the finished `partial_folder(folder)` to `folder`, replacing an older folder of that name."""
    partial = partial_folder(folder)
    # Synced before the rename, so that a complete name means complete files even after a power failure.
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    if folder.exists():
        _delete(folder)
    partial.rename(folder)
    sync(folder.parent)


def whole(root: Path) -> list[Path]:
    """Return all whole checkpoints, in no order."""
    return [folder for folder in root.glob("step-*") if _NAME.fullmatch(folder.name)]


def newest(root: Path) -> Path | None:
    """Return the whole checkpoint of the highest version; None when there is none."""
    return max(whole(root), default=None)


def find_damage(folder: Path) -> str | None:
    """Return the first file of a checkpoint that is not as it was written, and what differs; None for a whole checkpoint."""
    try:
        manifest = msgspec.json.decode((folder / _MANIFEST_FILE).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return f"{_MANIFEST_FILE} is missing"
    # Text that is not UTF-8 is none of msgspec's own errors.
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"{_MANIFEST_FILE} is damaged"
    for name, written in manifest.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            if (num_bytes := path.stat().st_size) != written.num_bytes:
                return f"{name} has {num_bytes} bytes instead of {written.num_bytes}"
            if _describe(path) != written:
                return f"{name} has other content than was written (its checksum differs)"
        # The learner may delete the checkpoint while another process reads it.
        except FileNotFoundError:
            return f"{name} is missing"
    return None


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is never loaded again, and return its new place."""
    places = [folder.with_name(f"{folder.name}.damaged{suffix}") for suffix in ("", *(f"-{index}" for index in range(2, 100)))]
    place = next(place for place in places if not place.exists())
    folder.rename(place)
    sync(folder.parent)
    return place


def prune(root: Path, *, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints and the best one, and the half-written ones of killed processes."""
    kept = {best(root), *sorted(whole(root))[-keep:]}
    for folder in whole(root):
        if folder not in kept:
            _delete(folder)
    for folder in root.glob("step-*.partial"):
        shutil.rmtree(folder, ignore_errors=True)


def note_evaluation(root: Path, policy_version: int, reward: float) -> None:
    """Keep the mean reward of an evaluation of this version, for `best`; nothing where no checkpoint was written yet."""
    if root.is_dir():
        rewards = {**_evaluations(root), policy_version: reward}
        replace(root / EVALUATIONS_FILE, msgspec.json.encode(rewards))


def forget_evaluations(root: Path, *, after: int) -> None:
    """Forget the rewards of versions after this one: a resumed run makes them again, with other weights."""
    rewards = _evaluations(root)
    kept = {version: reward for version, reward in rewards.items() if version <= after}
    if kept != rewards:
        replace(root / EVALUATIONS_FILE, msgspec.json.encode(kept))


def best(root: Path, among: Iterable[Path] | None = None) -> Path | None:
    """Return the checkpoint whose version got the highest reward in an evaluation, the newest of equals; None for none.

    `among`: the checkpoints to choose from; by default the whole ones of `root`.
    """
    rewards = _evaluations(root)
    evaluated = [folder for folder in (whole(root) if among is None else among) if version_of(folder) in rewards]
    return max(evaluated, key=lambda folder: (rewards[version_of(folder)], folder), default=None)


def _evaluations(root: Path) -> dict[int, float]:
    file = root / EVALUATIONS_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[int, float])
    # It is not synced: after a power failure it may be empty, and there is no best checkpoint until the next evaluation.
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}


def _describe(path: Path) -> FileEntry:
    with path.open("rb", buffering=0) as file:
        checksum = hashlib.file_digest(file, xxhash.xxh3_64)
        return FileEntry(file.tell(), checksum.hexdigest())


def _delete(folder: Path) -> None:
    # Renamed first, so that a kill in between leaves no partial checkpoint under a complete one's name.
    doomed = folder.with_name(folder.name + ".deleted.partial")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    # On NFS a file that a process of this machine still reads stays until it is closed. `prune` deletes the rest later.
    shutil.rmtree(doomed, ignore_errors=True)
