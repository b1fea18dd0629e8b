"""A run's folder: which files say that a run is in it, and the lock that lets one learner write there.

| in the folder | a new run | `run.resume` |
|---|---|---|
| a step in `metrics.jsonl`, or a checkpoint | is refused | goes on from the newest checkpoint and the log |
| remains of a start that made no step | moves them to `failed-starts` | goes on with the groups in the log |
| neither | begins | is refused, unless a learner was started here |
| a model, or a config of no run | is refused: the run would replace it | as above |
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.processes.files import limit_reached
from offbeat.common.records.rows import StepRow
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.common.settings.config import Config, RunSection
from offbeat.common.settings.loading import load

CHECKPOINTS = "checkpoints"
LOG = "log"
"""The rollout log."""
MODEL = "model"
"""The trained model, written at the end."""
PROGRAM_LOGS = "logs"
"""Logs of the learner, its further ranks and the actors started with it."""
CONFIG_FILE = "config.toml"
"""The resolved config, written by the learner."""
LAUNCH_FILE = "launch.toml"
"""The config that `offbeat train` gives to its services."""
FAILED_STARTS = "failed-starts"
IDENTITY_FILE = "identity.json"
"""Settings, hashes and software that the run is made with (`learner.restart.run_identity`)."""
PROMPT_HASHES_FILE = "prompts.bin"
LOCK_FILE = "learner.lock"
LAUNCHER_LOCK_FILE = "launcher.lock"
PORT_FILE = "page.port"
"""The port of the live page: whoever has it open sees the resumed run."""

_OF_A_START = (ROWS_FILE, LOG, CHECKPOINTS, "tensorboard", IDENTITY_FILE, PROMPT_HASHES_FILE)
"""Files and folders that a learner writes before its first step, besides its config."""
_MAX_OWNER_BYTES = 4096


class LockOwner(msgspec.Struct, frozen=True):
    """The process that holds the lock, as it wrote itself into the lock's file."""

    pid: int
    host: str


@contextmanager
def locked(folder: Path, name: str = LOCK_FILE) -> Iterator[None]:
    """Hold the folder for this process, and make it if need be; a second learner is refused, or launcher by its own file.

    The lock is a POSIX lock (fcntl): the kernel frees it when the process ends in any way, its children do not inherit it, and
    it holds between machines on NFS with its lock service. Raises `SettingError` about `run.dir` where another process has
    the folder, or where it cannot be locked or written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / name).open("a+b")
    # Closing the file anywhere in this process would free the lock: nothing else may open it.
    with file:
        _lock(file, folder, name)
        file.truncate(0)
        file.write(msgspec.json.encode(LockOwner(os.getpid(), socket.gethostname())))
        file.flush()
        yield


class FolderFailedError(ServiceError):
    """A file of the run cannot be read or written; the text names the file, the reason and the cure."""


@contextmanager
def naming_disk_errors(folder: Path) -> Iterator[None]:
    """Raise `FolderFailedError` where an `OSError` within is about a file below the run's folder."""
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
        if limit_reached(error) or path is None or not path.absolute().is_relative_to(folder.absolute()):
            raise
        if folder.is_dir():
            problem, cure = f"{path}: {error.strerror}", "Repair the disk, or remove what is in the way"
        else:
            problem, cure = "the folder was moved or deleted while the run was writing to it", "Put it back"
        raise FolderFailedError(
            f"run.dir = {folder}: {problem}. {cure}; then run.resume=true continues from what was written."
        ) from error


def read_owner(folder: Path, name: str = LOCK_FILE) -> LockOwner | None:
    """Return the process that last locked the folder, which may have ended; None where none did, or it says nothing yet."""
    try:
        return msgspec.json.decode((folder / name).read_bytes()[:_MAX_OWNER_BYTES], type=LockOwner)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None


class _Named(msgspec.Struct, frozen=True):
    """The part of a run's identity that names it."""

    run_id: str = ""


def read_run_id(folder: Path) -> str:
    """Return the id of the run in a folder; empty where there is none, or its file is damaged."""
    try:
        return msgspec.json.decode((folder / IDENTITY_FILE).read_bytes(), type=_Named).run_id
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return ""


def read_run_config(folder: Path) -> Config:
    """Return the resolved config of the run in a folder. `SettingError` where the folder has none."""
    file = folder / CONFIG_FILE
    if not file.exists():
        raise SettingError("RUN", str(folder), f"it has no {CONFIG_FILE}", "Name the folder of a run.")
    return load(file)


def check_run_folder(run: RunSection) -> None:
    """Raise `SettingError` for a folder in which a new run would replace something, or with no run where one shall go on."""
    folder = Path(run.dir)
    if not run.resume and has_steps(folder):
        cure = "Set run.resume=true to continue it, or another run.dir."
        raise SettingError("run.dir", run.dir, "the folder already holds a run", cure)
    if not run.resume and (of_users := _would_be_replaced(folder)) is not None:
        problem = f"the run would replace the {of_users} there"
        raise SettingError("run.dir", run.dir, problem, "Name another run.dir, or move that elsewhere.")
    if run.resume and not folder.is_dir():
        cure = "Give the folder of an earlier run."
        raise SettingError("run.dir", run.dir, "there is no such folder to resume from", cure)
    if run.resume and not any((folder / name).exists() for name in (*_OF_A_START, CONFIG_FILE, LAUNCH_FILE)):
        cure = "Give the folder of an earlier run, or leave run.resume out."
        raise SettingError("run.dir", run.dir, "no run was ever started in the folder", cure)


def _would_be_replaced(folder: Path) -> str | None:
    """Return what a new run in a folder without steps would replace that no run has written; None for nothing."""
    # Runs write theirs after a step.
    if (folder / MODEL).exists():
        return f"folder {MODEL}"
    is_of_a_start = any((folder / name).exists() for name in (IDENTITY_FILE, FAILED_STARTS))
    return f"file {CONFIG_FILE}" if (folder / CONFIG_FILE).exists() and not is_of_a_start else None


def decide_resume(config: Config) -> Config:
    """Return the config with `run.resume = "auto"` decided: True where the folder has a step, or a log with leases."""
    if config.run.resume != "auto":
        return config
    return replace(config, run=replace(config.run, resume=holds_work(Path(config.run.dir))))


def holds_work(folder: Path) -> bool:
    """Return whether the folder has a step, or a log with leases."""
    return has_steps(folder) or any((folder / LOG).glob("*.log"))


def has_steps(folder: Path) -> bool:
    """Return whether the run in the folder has made an optimizer step."""
    return has_checkpoint(folder) or next(read_rows_of(folder / ROWS_FILE, StepRow), None) is not None


def has_checkpoint(folder: Path) -> bool:
    """Return whether the folder has a checkpoint that was written to its end."""
    return any(path.suffix == "" for path in (folder / CHECKPOINTS).glob("step-*"))


def bytes_of_files(folder: Path) -> dict[str, int]:
    """Return the size of what a run writes, by its name in the folder, largest first; nothing for what is not there."""
    names = (ROWS_FILE, LOG, CHECKPOINTS, MODEL, "tensorboard", PROGRAM_LOGS)
    sizes = {name: sum(_size(path) for path in [folder / name, *(folder / name).rglob("*")]) for name in names}
    return dict(sorted(((name, size) for name, size in sizes.items() if size), key=lambda item: -item[1]))


def _size(path: Path) -> int:
    # The learner deletes old segments and checkpoints meanwhile.
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def set_aside_failed_start(folder: Path) -> Path | None:
    """Move the files of a start that made no step to a folder below `failed-starts`, and return that folder.

    Returns None, and moves nothing, when the start wrote neither a row nor a log.
    """
    rows = folder / ROWS_FILE
    if not (folder / LOG).exists() and not (rows.exists() and rows.stat().st_size):
        return None
    aside = folder / FAILED_STARTS
    aside.mkdir(exist_ok=True)
    # The user may have deleted earlier ones.
    target = aside / str(1 + max((int(path.name) for path in aside.iterdir() if path.name.isdecimal()), default=0))
    target.mkdir()
    for path in (folder / name for name in _OF_A_START):
        if path.exists():
            path.rename(target / path.name)
    return target


@contextmanager
def writing(folder: Path, setting: str = "run.dir") -> Iterator[None]:
    """Raise `SettingError` about the setting that names the folder, where it cannot be made or written in this context."""
    try:
        yield
    except OSError as error:
        problem = f"the folder cannot be written ({error.strerror})"
        raise SettingError(setting, str(folder), problem, "Name a folder that you may write to.") from error


def _lock(file: BinaryIO, folder: Path, name: str) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        owner = read_owner(folder, name)
        known = "" if owner is None else f" (process {owner.pid} on {owner.host!r})"
        problem = f"another {Path(name).stem}{known} is at work in the folder"
        raise SettingError("run.dir", str(folder), problem, "Wait for its end or stop it, or give another run.dir.") from error
    except OSError as error:
        problem = f"its file system gives no lock ({error.strerror}), so two learners could write at once"
        raise SettingError("run.dir", str(folder), problem, "Name a folder on a file system with locks.") from error
