from pathlib import Path

from learner import checkpoints


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
