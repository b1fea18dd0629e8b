"""A file is replaced whole or not at all, and its bytes are on disk before it has its name."""

from pathlib import Path

import pytest

from offbeat.common.processes import files
from offbeat.common.processes.files import replace


class DeathError(BaseException):
    """Raised in place of the process's death."""


def die(*_: object) -> None:
    raise DeathError


@pytest.mark.parametrize("moment", ["write", "sync", "rename"])
def test_process_that_dies_while_it_replaces_a_file_leaves_the_old_one(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch, pytest.raises(DeathError):
        owner, name = {"write": (Path, "write_bytes"), "sync": (files, "sync"), "rename": (Path, "rename")}[moment]
        patch.setattr(owner, name, die)
        replace(path, b"new")
    assert path.read_bytes() == b"old"
    replace(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path], "what the dead one left is gone"


def test_bytes_are_on_disk_before_the_file_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[bytes, bool]] = []
    path = tmp_path / "file"
    monkeypatch.setattr(files, "sync", lambda partial: synced.append((partial.read_bytes(), path.exists())))
    replace(path, b"new")
    assert synced == [(b"new", False)]
