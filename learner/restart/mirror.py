"""The run's copy in object storage, for machines whose disks go with them: a thread uploads, a start on an empty disk fetches.

    run.dir: closed log segments, whole checkpoints, metrics, config, identity -> Mirror (thread) -> run.mirror -> fetch_run

A closed segment and a whole checkpoint never change, so each is uploaded once, unless a later learner makes it again. The
segment that is being written is uploaded with each checkpoint, which thus finds its whole past there. A disk takes with it the
groups that were accepted after the newest segment or checkpoint was uploaded, a segment of 64 MB and what arrives during an
upload at most; their prompts are re-queued.
"""

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EventRow, Recorder
from offbeat.common.records.run_folder import CHECKPOINTS, CONFIG_FILE, IDENTITY_FILE, LOG, MODEL, PROMPT_HASHES_FILE
from offbeat.common.records.writer import ROWS_FILE
from offbeat.learner.leases.log_reading import segment_name, segment_numbers
from offbeat.learner.reporting.trackers import KINDS, id_file
from offbeat.learner.training import checkpoints

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks at the run's folder."""
SILENCE_S = 300.0
"""Seconds that the last upload may go on without a part or, where the storage tells of none, a file that has come."""
_SMALL = (CONFIG_FILE, IDENTITY_FILE, PROMPT_HASHES_FILE, ROWS_FILE, *(id_file(kind) for kind in KINDS))
_EVALUATIONS = f"{CHECKPOINTS}/{checkpoints.EVALUATIONS_FILE}"
_PARTIAL = "mirror.partial"
"""Folder in the run's for what is being fetched."""


def open_storage(url: str) -> DirFileSystem:
    """Return the folder at `run.mirror`; raise `SettingError` where nothing can read such addresses."""
    try:
        files, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        cure = "Install the package that reads such addresses (s3fs for s3://), or name a folder."
        raise SettingError("run.mirror", url, str(error), cure) from error
    # Each storage's library has errors of its own; that of ftp:// connects above.
    except Exception as error:
        raise _unreadable(url, error) from error
    storage = DirFileSystem(root.rstrip("/"), files)
    try:
        sizes_in(storage)
    except Exception as error:
        raise _unreadable(url, error) from error
    return storage


def _unreadable(url: str, error: Exception) -> SettingError:
    problem = f"the place cannot be read ({type(error).__name__}: {error})"
    return SettingError("run.mirror", url, problem, "Correct the address, or the storage's rights and variables.")


def sizes_in(storage: DirFileSystem) -> dict[str, int]:
    """Return the size of each file in the storage, by its path there."""
    storage.invalidate_cache()
    if not storage.exists(""):
        return {}
    found: dict[str, Any] = storage.find("", detail=True)  # pyright: ignore[reportAssignmentType]
    return {name: entry["size"] for name, entry in found.items()}


def _is_manifest(name: str) -> bool:
    return name.startswith(f"{CHECKPOINTS}/") and name.endswith("/manifest.json")


class Mirror:
    """Uploads what is new in the run's folder, from a thread of its own, until the context ends; then all of it once more."""

    def __init__(self, folder: Path, storage: DirFileSystem, record: Recorder) -> None:
        self._folder = folder
        self._storage = storage
        self._record = record
        self._is_over = threading.Event()
        self._is_failing = False
        self._moved_at = time.monotonic()
        self._progress = Callback(hooks={"moved": self._note_progress})
        self._there = sizes_in(storage)
        """Sizes of the files in the storage."""
        # A start that failed before it had a log may have left the identity of another run. It is uploaded again at once.
        self._there.pop(IDENTITY_FILE, None)
        self._uncompared = {name for name in self._there if _is_manifest(name)}
        """Manifests of earlier learners' checkpoints that may differ from the run's of the same name."""
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._moved_at = time.monotonic()
        self._is_over.set()
        while self._thread.is_alive():
            self._thread.join(timeout=min(1.0, SILENCE_S))
            if time.monotonic() - self._moved_at > SILENCE_S:
                self._note_failure(f"{self._storage.path} took nothing for {SILENCE_S:.0f} s")
                return

    def upload(self, *, is_last: bool = False) -> None:
        """Upload what the storage lacks, and delete from it what the run has deleted. `is_last`: nobody writes any more."""
        segments = segment_numbers(self._folder / LOG) if (self._folder / LOG).is_dir() else []
        whole = sorted(checkpoints.whole(self._folder / CHECKPOINTS))
        remade = [folder for folder in whole if self._can_replace(folder)]
        new = [folder for folder in whole if self._name(checkpoints.manifest(folder)) not in self._there] + remade
        # The segments come before the checkpoints that refer to them, and a checkpoint's manifest after its other files.
        count = len(segments) if new or is_last else max(0, len(segments) - 1)
        for number in segments[:count]:
            self._put(self._folder / LOG / segment_name(number))
        for folder in new:
            manifest = checkpoints.manifest(folder)
            if folder in remade:
                self._forget(folder)
            for file in sorted(folder.rglob("*"), key=lambda file: file == manifest):
                self._put(file)
        if new or is_last or IDENTITY_FILE not in self._there:
            for name in (*_SMALL, _EVALUATIONS):
                self._put(self._folder / name, may_change=True)
        if is_last and (self._folder / MODEL).is_dir():
            for file in (self._folder / MODEL).rglob("*"):
                self._put(file)
        self._delete({segment_name(number) for number in segments}, {folder.name for folder in whole})

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._try_upload()
        self._try_upload(is_last=True)

    def _try_upload(self, *, is_last: bool = False) -> None:
        try:
            self.upload(is_last=is_last)
        # Each storage's library has errors of its own. The run goes on without its mirror, and says so.
        except Exception as error:  # noqa: BLE001
            if not self._is_failing or is_last:
                self._note_failure(f"{self._storage.path}: {type(error).__name__}: {error}")
            self._is_failing = True
        else:
            if self._is_failing:
                logger.info("run.mirror: %s works again", self._storage.path)
            self._is_failing = False

    def _note_failure(self, problem: str) -> None:
        detail = f"{problem}; what is new is only on this machine until it works"
        logger.warning("run.mirror: %s", detail)
        self._record(EventRow(event="mirror_failed", detail=detail))

    def _note_progress(self, *_: object) -> None:
        self._moved_at = time.monotonic()

    def _put(self, file: Path, *, may_change: bool = False) -> None:
        """Upload a file unless the storage has one of its size; nothing for what a prune has just deleted.

        `may_change`: another content may have the same size.
        """
        name = self._name(file)
        try:
            size = file.stat().st_size
            if not file.is_file() or (self._there.get(name) == size and not may_change):
                return
            self._storage.makedirs(name.rpartition("/")[0], exist_ok=True)
            self._storage.put_file(str(file), name, callback=self._progress)
        except FileNotFoundError:
            return
        self._note_progress()
        self._there[name] = size

    def _can_replace(self, folder: Path) -> bool:
        """Return whether the storage has another checkpoint of this name, and one besides it to go on from meanwhile.

        A run whose newest checkpoint was damaged goes back, and makes one of the same name again.
        """
        manifest = checkpoints.manifest(folder)
        name = self._name(manifest)
        if name not in self._uncompared:
            return False
        try:
            is_other = self._storage.cat_file(name) != manifest.read_bytes()
        # A prune has just deleted the folder.
        except FileNotFoundError:
            return False
        if not is_other:
            self._uncompared.remove(name)
        return is_other and any(_is_manifest(there) and there != name for there in self._there)

    def _forget(self, folder: Path) -> None:
        """Delete a checkpoint's manifest from the storage, whose other files are then to be uploaded again."""
        name = self._name(checkpoints.manifest(folder))
        self._storage.rm_file(name)
        self._uncompared.remove(name)
        beginning = f"{self._name(folder)}/"
        self._there = {there: size for there, size in self._there.items() if not there.startswith(beginning)}

    def _delete(self, segments: set[str], whole: set[str]) -> None:
        for name in sorted(self._there):
            kind, _, rest = name.partition("/")
            kept = segments if kind == LOG else whole | {checkpoints.EVALUATIONS_FILE}
            is_old = kind in (LOG, CHECKPOINTS) and rest.partition("/")[0] not in kept
            if is_old:
                self._storage.rm_file(name)
                del self._there[name]

    def _name(self, file: Path) -> str:
        return file.relative_to(self._folder).as_posix()


def open_mirror(folder: Path, url: str, record: Recorder, *, resume: bool) -> Mirror:
    """Return the mirror of the run in `folder`; raise `SettingError` where it would lose what the storage has."""
    storage = open_storage(url)
    names = sizes_in(storage)
    if not resume and any(name.startswith((f"{LOG}/", f"{CHECKPOINTS}/")) for name in names):
        cure = "Set run.resume=true (or auto) to continue it, or name another place."
        raise SettingError("run.mirror", url, "it already holds a run", cure)
    here = {segment_name(number) for number in segment_numbers(folder / LOG)} if (folder / LOG).is_dir() else set[str]()
    newest = max((name for name in names if name.startswith(f"{LOG}/")), default="")
    if newest.removeprefix(f"{LOG}/") > max(here, default=""):
        problem = f"its log has {newest}, which {folder} has not: the run went on elsewhere"
        cure = "Move the folder away, and the learner fetches the run; or name another."
        raise SettingError("run.mirror", url, problem, cure)
    return Mirror(folder, storage, record)


def fetch_run(folder: Path, url: str) -> bool:
    """Fetch the newest checkpoint, the best one and the log of a mirrored run into a folder that holds none.

    Return whether there is one.
    """
    storage = open_storage(url)
    names = sorted(sizes_in(storage))
    whole = sorted(Path(name).parent for name in names if _is_manifest(name))
    if not whole and not any(name.startswith(f"{LOG}/") for name in names):
        return False
    partial = folder / _PARTIAL

    def fetch(name: str) -> None:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        storage.get_file(name, str(partial / name))

    shutil.rmtree(partial, ignore_errors=True)
    if _EVALUATIONS in names:
        fetch(_EVALUATIONS)
    kept = {*whole[-1:], checkpoints.best(partial / CHECKPOINTS, among=whole)}
    for name in names:
        if name in _SMALL or name.startswith(f"{LOG}/") or any(path in kept for path in Path(name).parents):
            fetch(name)
    # The checkpoint first: a folder with a log alone would begin again at the first step.
    for name in (CHECKPOINTS, LOG, *_SMALL):
        if (partial / name).exists():
            (partial / name).replace(folder / name)
    partial.rmdir()
    logger.info("fetched the run from %s: %s", url, whole[-1].name if whole else "its log, no checkpoint")
    return True
