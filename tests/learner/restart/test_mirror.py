"""A run's copy in storage: what is uploaded and when, and a run that goes on from it on an empty disk."""

import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.callbacks import Callback

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import Row, row_fields
from offbeat.common.settings.config import Config, RunSection
from offbeat.common.settings.loading import resolved_toml
from offbeat.deploy.cli import start
from offbeat.deploy.cli.start import learner_command, settle_resume
from offbeat.learner.restart import mirror
from offbeat.learner.restart.mirror import Mirror, fetch_run, open_mirror, open_storage, sizes_in
from offbeat.learner.training import checkpoints

SMALL = {"config.toml": b"c", "identity.json": b"i", "prompts.bin": b"p", "metrics.jsonl": b"m"}


class Run:
    """A run's folder, and what was recorded about its mirror."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.rows: list[dict[str, Any]] = []
        for name, content in SMALL.items():
            self.write(name, content)

    def write(self, name: str, content: bytes) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(content)

    def save(self, version: int, weights: bytes = b"weights") -> None:
        folder = checkpoints.checkpoint_folder(self.folder / "checkpoints", version)
        partial = checkpoints.partial_folder(folder)
        partial.mkdir(parents=True)
        (partial / "rank.safetensors").write_bytes(weights)
        checkpoints.publish(folder)

    def record(self, row: Row) -> None:
        self.rows.append(row_fields(row))

    def mirror(self, *, resume: bool = False) -> Mirror:
        return open_mirror(self.folder, self.url, self.record, resume=resume)

    def remake(self) -> Mirror:
        """Mirror checkpoint 8, set it aside, and make it again after a restart; return the restarted learner's mirror."""
        self.save(8)
        self.mirror().upload()
        checkpoints.set_aside(self.folder / "checkpoints/step-00000008")
        uploads = self.mirror(resume=True)
        self.save(8, b"remade!")
        return uploads

    def there(self) -> set[str]:
        return set(sizes_in(open_storage(self.url)))


@pytest.fixture(params=["a folder", "object storage"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    url = f"{tmp_path}/far/away" if request.param == "a folder" else f"memory://bucket{tmp_path}"
    return Run(tmp_path / "run", url)


def checkpoint(version: int) -> set[str]:
    return {f"checkpoints/step-{version:08d}/{name}" for name in ("manifest.json", "rank.safetensors")}


def test_closed_segments_are_uploaded_as_they_are_and_the_open_one_with_a_checkpoint(run: Run) -> None:
    run.write("log/00000001.log", b"closed")
    run.write("log/00000002.log", b"open")
    run.write("checkpoints/step-00000003.partial/rank.safetensors", b"half")
    uploads = run.mirror()
    uploads.upload()
    assert run.there() == {*SMALL, "log/00000001.log"}
    run.write("log/00000002.log", b"open and longer")
    run.write("metrics.jsonl", b"n")
    run.save(4)
    uploads.upload()
    assert run.there() == {*SMALL, "log/00000001.log", "log/00000002.log", *checkpoint(4)}
    storage = open_storage(run.url)
    assert storage.cat_file("log/00000002.log") == b"open and longer"
    assert storage.cat_file("metrics.jsonl") == b"n"


def test_what_the_run_deleted_goes_after_what_is_new_has_come(run: Run) -> None:
    run.write("log/00000001.log", b"closed")
    run.write("log/00000002.log", b"open")
    run.save(4)
    uploads = run.mirror()
    uploads.upload()
    run.save(8)
    checkpoints.prune(run.folder / "checkpoints", keep=1)
    (run.folder / "log/00000001.log").unlink()
    uploads.upload()
    assert run.there() == {*SMALL, "log/00000002.log", *checkpoint(8)}


def test_checkpoint_that_is_made_again_replaces_the_one_of_its_name(run: Run, tmp_path: Path) -> None:
    run.save(4)
    uploads = run.remake()
    uploads.upload()
    assert fetch_run(tmp_path / "other", run.url)
    fetched = tmp_path / "other/checkpoints/step-00000008"
    assert checkpoints.find_damage(fetched) is None
    assert (fetched / "rank.safetensors").read_bytes() == b"remade!"


def test_mirrors_only_checkpoint_is_replaced_once_there_is_another(run: Run) -> None:
    weights = "checkpoints/step-00000008/rank.safetensors"
    storage = open_storage(run.url)
    uploads = run.remake()
    uploads.upload()
    assert storage.cat_file(weights) == b"weights"
    run.save(12)
    uploads.upload()
    assert checkpoint(8) | checkpoint(12) <= run.there()
    uploads.upload()
    assert storage.cat_file(weights) == b"remade!"
    assert checkpoint(8) | checkpoint(12) <= run.there()


def test_replaced_checkpoint_is_never_whole_with_files_of_two(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(4)
    uploads = run.remake()
    put, seen = uploads._storage.put_file, list[set[str]]()

    def look_and_put(*arguments: Any, **options: Any) -> None:
        seen.append(run.there() & checkpoint(8))
        put(*arguments, **options)

    monkeypatch.setattr(uploads._storage, "put_file", look_and_put)
    uploads.upload()
    assert seen and not any("checkpoints/step-00000008/manifest.json" in names for names in seen[:2])
    assert checkpoint(4) | checkpoint(8) <= run.there()


def test_run_goes_on_from_its_mirror_on_an_empty_disk(run: Run, tmp_path: Path) -> None:
    run.write("log/00000001.log", b"closed")
    run.write("log/00000002.log", b"written to the last moment")
    run.write("model/config.json", b"{}")
    run.write("mlflow_run_id.txt", b"its run in a tracker")
    run.save(4)
    run.save(8)
    with run.mirror():
        pass
    assert "model/config.json" in run.there()
    elsewhere = tmp_path / "other" / "run"
    config = Config(run=RunSection(dir=str(elsewhere), resume="auto", mirror=run.url))
    assert settle_resume(config).run.resume is True
    names = {path.relative_to(elsewhere).as_posix() for path in elsewhere.rglob("*") if path.is_file()}
    fetched = {*SMALL, "mlflow_run_id.txt", "log/00000001.log", "log/00000002.log", *checkpoint(8)}
    assert names == {*fetched, "learner.lock"}
    assert all((elsewhere / name).read_bytes() == (run.folder / name).read_bytes() for name in fetched)
    assert checkpoints.find_damage(elsewhere / "checkpoints/step-00000008") is None
    moved = Run(elsewhere, run.url)
    moved.mirror(resume=True).upload()
    moved.write("log/00000003.log", b"the next learner's")
    with moved.mirror(resume=True):
        pass
    with pytest.raises(SettingError, match=r"run\.mirror.*log/00000003\.log.*went on elsewhere"):
        run.mirror(resume=True)


def test_only_rank_0_of_the_learner_fetches_the_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(4)
    run.mirror().upload()
    elsewhere = tmp_path / "other" / "run"
    resumes: list[object] = []
    monkeypatch.setattr(start, "begin_log", lambda _: None)
    monkeypatch.setattr(start, "_run_learner", lambda config, **_: resumes.append(config.run.resume))
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = Config(run=RunSection(dir=str(elsewhere), resume="auto", mirror=run.url))
    (tmp_path / "run.toml").write_text(resolved_toml(config))
    arguments = [str(tmp_path / "run.toml"), "launch.learner_processes=2"]
    monkeypatch.setenv("RANK", "1")
    learner_command(arguments, preflight=False)
    # Not even the lock, which rank 0 may hold.
    assert not elsewhere.exists()
    monkeypatch.setenv("RANK", "0")
    learner_command(arguments, preflight=False)
    assert resumes[1:] == [True] and (elsewhere / "checkpoints" / "step-00000004").is_dir()


def test_best_checkpoint_moves_with_the_run_and_stays_in_the_mirror(run: Run, tmp_path: Path) -> None:
    for version in (4, 8, 12):
        run.save(version)
        checkpoints.note_evaluation(run.folder / "checkpoints", version, 0.9 if version == 4 else 0.1)
    with run.mirror():
        pass
    moved = Run(tmp_path / "other", run.url)
    assert fetch_run(moved.folder, run.url)
    root = moved.folder / "checkpoints"
    assert {folder.name for folder in checkpoints.whole(root)} == {"step-00000004", "step-00000012"}
    best = checkpoints.best(root)
    assert best is not None and best.name == "step-00000004" and checkpoints.find_damage(best) is None
    with moved.mirror(resume=True):
        pass
    assert {*checkpoint(4), *checkpoint(12), "checkpoints/evaluations.json"} <= moved.there()


@pytest.mark.slow
def test_end_waits_for_a_storage_that_still_takes_parts_and_leaves_a_silent_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "SILENCE_S", 0.3)
    run = Run(tmp_path / "run", f"{tmp_path}/far")
    release = threading.Event()

    def slow(_: object, __: str, name: str, callback: Callback) -> None:
        for _part in range(4):
            time.sleep(0.1)
            callback.relative_update(1)
        if name == "metrics.jsonl":
            release.wait(30)

    monkeypatch.setattr(mirror.DirFileSystem, "put_file", slow)
    with run.mirror():
        pass
    release.set()
    assert [row["event"] for row in run.rows] == ["mirror_failed"]
    assert "took nothing for 0 s" in run.rows[0]["detail"]


def test_checkpoint_whose_upload_broke_off_is_not_fetched(run: Run, tmp_path: Path) -> None:
    run.save(4)
    run.mirror().upload()
    run.save(8)
    name = "checkpoints/step-00000008/rank.safetensors"
    storage = open_storage(run.url)
    storage.makedirs("checkpoints/step-00000008")
    storage.put_file(str(run.folder / name), name)
    assert fetch_run(tmp_path / "other", run.url)
    assert [folder.name for folder in (tmp_path / "other/checkpoints").iterdir()] == ["step-00000004"]


def test_manifest_is_the_last_file_of_a_checkpoint_to_come(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(4)
    uploads, put = run.mirror(), []
    monkeypatch.setattr(type(uploads._storage), "put_file", lambda _, file, name, callback: put.append(name))
    uploads.upload()
    assert [name.rpartition("/")[2] for name in put if name.startswith("checkpoints/")] == ["rank.safetensors", "manifest.json"]


def test_new_run_begins_where_the_mirror_is_empty_and_overwrites_none(run: Run, tmp_path: Path) -> None:
    config = Config(run=RunSection(dir=str(tmp_path / "other"), resume="auto", mirror=run.url))
    assert settle_resume(config).run.resume is False
    run.save(4)
    run.mirror().upload()
    with pytest.raises(SettingError, match=r"run\.mirror.*already holds a run.*run\.resume=true"):
        run.mirror()


def test_identity_of_a_start_that_failed_is_replaced_before_the_first_checkpoint(run: Run) -> None:
    run.mirror().upload(is_last=True)
    run.write("identity.json", b"of the start after it")
    run.write("log/00000001.log", b"closed")
    run.write("log/00000002.log", b"open")
    run.mirror().upload()
    assert open_storage(run.url).cat_file("identity.json") == b"of the start after it"


def test_mirror_that_cannot_be_had_is_a_mistake_at_the_start() -> None:
    with pytest.raises(SettingError, match=r"run\.mirror.*nosuch.*Install the package"):
        open_storage("nosuch://bucket/run")
    # Its library connects before anything is read, and nobody listens there.
    with pytest.raises(SettingError, match=r"run\.mirror.*cannot be read.*refused"):
        open_storage("ftp://127.0.0.1:1/run")


def test_mirror_that_fails_is_told_once_and_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "LOOK_S", 0.01)
    uploads = run.mirror()
    calls: list[int] = []
    put_file = fsspec.AbstractFileSystem.put_file if "memory" in run.url else type(uploads._storage.fs).put_file

    def broken(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) < 5:
            raise ConnectionError("no route")
        put_file(*arguments, **options)

    monkeypatch.setattr(type(uploads._storage.fs), "put_file", broken)
    with uploads:
        while len(calls) < 6:
            time.sleep(0.01)
    assert [row["event"] for row in run.rows] == ["mirror_failed"]
    assert "ConnectionError: no route" in run.rows[0]["detail"]
    assert run.there() == set(SMALL)
