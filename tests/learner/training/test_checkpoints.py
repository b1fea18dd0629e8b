"""Checkpoint folders are whole or ignored, and pruned from the oldest."""

import errno
import os
from pathlib import Path

import pytest

from offbeat.learner.training import checkpoints


def write(root: Path, policy_version: int, content: str = "") -> Path:
    folder = checkpoints.checkpoint_folder(root, policy_version)
    partial = checkpoints.partial_folder(folder)
    partial.mkdir(parents=True)
    (partial / "weights").write_text(content)
    checkpoints.publish(folder)
    return folder


def test_the_newest_checkpoint_is_the_one_of_the_highest_version(tmp_path):
    for version in (9, 100, 20):
        write(tmp_path, version)
    assert checkpoints.newest(tmp_path) == checkpoints.checkpoint_folder(tmp_path, 100)


def test_there_is_no_newest_without_checkpoints(tmp_path):
    assert checkpoints.newest(tmp_path) is None
    assert checkpoints.newest(tmp_path / "missing") is None


def test_a_half_written_checkpoint_is_never_taken(tmp_path):
    whole = write(tmp_path, 1)
    checkpoints.partial_folder(checkpoints.checkpoint_folder(tmp_path, 2)).mkdir()
    assert checkpoints.newest(tmp_path) == whole


def test_a_checkpoint_replaces_the_one_of_its_version(tmp_path):
    write(tmp_path, 1, "old")
    folder = write(tmp_path, 1, "new")
    assert (folder / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_pruning_keeps_the_newest_and_clears_what_was_half_written(tmp_path):
    for version in (1, 2, 3, 10):
        write(tmp_path, version)
    checkpoints.partial_folder(checkpoints.checkpoint_folder(tmp_path, 11)).mkdir()
    checkpoints.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


def test_pruning_fewer_than_it_keeps_deletes_none(tmp_path):
    write(tmp_path, 1)
    checkpoints.prune(tmp_path, keep=2)
    assert checkpoints.newest(tmp_path) == checkpoints.checkpoint_folder(tmp_path, 1)


def test_whole_checkpoints_are_all_but_the_half_written(tmp_path):
    folders = {write(tmp_path, version) for version in (1, 3)}
    checkpoints.partial_folder(checkpoints.checkpoint_folder(tmp_path, 2)).mkdir()
    assert set(checkpoints.whole(tmp_path)) == folders


def test_file_that_is_still_read_on_nfs_keeps_no_checkpoint_from_being_replaced_or_deleted(tmp_path, monkeypatch):
    write(tmp_path, 1, "old")
    rmdir = os.rmdir

    def rmdir_on_nfs(path: str | Path, *, dir_fd: int | None = None) -> None:
        # NFS renames a deleted file that a process of this machine has open, and its folder is not empty until then.
        if str(path).endswith(".deleted.partial"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        rmdir(path, dir_fd=dir_fd)

    with monkeypatch.context() as of_reader:
        of_reader.setattr(os, "rmdir", rmdir_on_nfs)
        replaced = write(tmp_path, 1, "new")
        assert (replaced / "weights").read_text() == "new"
        newest = write(tmp_path, 2)
        checkpoints.prune(tmp_path, keep=1)
        assert checkpoints.whole(tmp_path) == [newest]
    checkpoints.prune(tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == [newest]


def test_extra_is_read_as_it_was_written(tmp_path):
    folder = checkpoints.checkpoint_folder(tmp_path, 1)
    partial = checkpoints.partial_folder(folder)
    partial.mkdir()
    checkpoints.write_extra(partial, b"\x00state")
    checkpoints.publish(folder)
    assert checkpoints.read_extra(folder) == b"\x00state"


def test_checkpoints_folder_that_is_a_file_costs_the_checkpoint_alone(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(checkpoints.CheckpointFailedError, match="File exists"):
        checkpoints.require_room(tmp_path / "checkpoints", 1)
    with pytest.raises(checkpoints.CheckpointFailedError, match="No such file"):
        checkpoints.require_room(tmp_path / "moved" / "checkpoints", 1)
    assert not (tmp_path / "moved").exists()


def test_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    root = tmp_path / "checkpoints"
    checkpoints.require_room(root, 0)
    with pytest.raises(checkpoints.CheckpointFailedError, match=r"takes about \d+ MB, and \d+ MB are free"):
        checkpoints.require_room(root, 1 << 60)
    assert list(root.iterdir()) == []


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: flip(folder / "weights", 3), "weights has other content than was written (its checksum differs)"),
        (lambda folder: (folder / "weights").write_text("abc"), "weights has 3 bytes instead of 8"),
        (lambda folder: (folder / "weights").unlink(), "weights is missing"),
        (lambda folder: flip(folder / "manifest.json", 0), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    ],
)
def test_damage_is_found_before_anything_is_loaded_and_named(tmp_path, damage, said):
    folder = write(tmp_path, 1, "contents")
    assert checkpoints.find_damage(folder) is None
    damage(folder)
    assert checkpoints.find_damage(folder) == said


def test_any_flipped_bit_of_any_file_is_found(tmp_path):
    folder = write(tmp_path, 1, "contents")
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == ["manifest.json", "weights"]
    for path in files:
        whole = path.read_bytes()
        for offset in range(len(whole)):
            flip(path, offset)
            # White space of the manifest may change.
            assert checkpoints.find_damage(folder) or whole[offset : offset + 1].isspace()
            path.write_bytes(whole)


def test_damaged_checkpoints_of_one_version_are_all_kept(tmp_path):
    for index in range(3):
        checkpoints.set_aside(write(tmp_path, 1, str(index)))
    names = ["step-00000001.damaged", "step-00000001.damaged-2", "step-00000001.damaged-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert checkpoints.whole(tmp_path) == []
    write(tmp_path, 2)
    checkpoints.prune(tmp_path, keep=1)
    assert len(list(tmp_path.iterdir())) == 4


def test_death_at_any_moment_of_replacing_a_checkpoint_leaves_a_whole_one(tmp_path, monkeypatch):
    """Kill the process at every call that changes the folders."""
    for moment in range(100):
        root = tmp_path / str(moment)
        write(root, 1, "one")
        write(root, 2, "old")
        life = Life(moment)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.shutil, "rmtree", life.of(checkpoints.shutil.rmtree))
            patch.setattr(Path, "rename", life.of(Path.rename))
            patch.setattr(checkpoints, "sync", life.of(checkpoints.sync))
            try:
                write(root, 2, "new")
                checkpoints.prune(root, keep=1)
            except Death:
                pass
            else:
                assert [folder.name for folder in root.iterdir()] == ["step-00000002"]
                assert moment > 5
                return
        newest = checkpoints.newest(root)
        assert newest is not None
        assert (newest / "weights").read_text() in ("one", "old", "new")
        checkpoints.prune(root, keep=1)
        assert [folder.name for folder in root.iterdir()] == [newest.name], "nothing half-written stays"
    raise AssertionError("it never came to an end")


class Death(BaseException):
    """Raised in place of the process's death."""


class Life:
    """Allow `num_calls` calls, then raise `Death`."""

    def __init__(self, num_calls):
        self.num_calls_left = num_calls

    def of(self, act):
        def may_die(*args, **kwargs):
            if not self.num_calls_left:
                raise Death
            self.num_calls_left -= 1
            return act(*args, **kwargs)

        return may_die
