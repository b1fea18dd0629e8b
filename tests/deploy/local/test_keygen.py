"""One `offbeat keygen` introduces learner, actors and operators to each other."""

import stat
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.hub_keys import keys_of_learner, keys_of_peer
from offbeat.common.settings.loading import load
from offbeat.deploy.local.keygen import make_keys
from offbeat.protocols.keys import read_allowed_keys, read_key_pair, read_public_key


def keygen(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat.deploy.cli.main", "keygen", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def names(folder: Path) -> list[tuple[str | None, str]]:
    """Return roles and names in the allow-list."""
    return [(sender.role, sender.name) for sender in read_allowed_keys(folder / "allowed_keys").values()]


@pytest.mark.slow
def test_what_the_command_prints_is_a_config_with_which_everybody_gets_keys(tmp_path: Path, monkeypatch) -> None:
    result = keygen(tmp_path, "keys", "actor-0", "gpu-*", "--operator", "me")
    assert result.returncode == 0, result.stderr
    lines = [line.strip() for line in result.stdout.splitlines()]
    start = lines.index("[hub]")
    (tmp_path / "run.toml").write_text("\n".join(lines[start : start + 4]))
    monkeypatch.chdir(tmp_path)
    hub = load(tmp_path / "run.toml").hub
    learner = keys_of_learner(hub)
    assert learner is not None
    services: list[tuple[str, Literal["actor", "operator"]]] = [
        ("actor-0", "actor"),
        ("me", "operator"),
        ("operator", "operator"),
    ]
    for name, role in services:
        peer = keys_of_peer(hub, name, role)
        assert peer is not None
        assert peer.learner_key == learner.key.owner
        assert learner.allowed.sender(peer.key.owner.public) == (name, role)
    fleet = load(tmp_path / "run.toml", ["hub.key=keys/gpu.key"]).hub
    assert keys_of_peer(fleet, "gpu-17") is not None


def test_files_have_the_rights_they_need_and_belong_together(tmp_path: Path) -> None:
    make_keys(tmp_path, ["actor-0"])
    for name in ("learner", "operator", "actor-0"):
        secret = tmp_path / f"{name}.key"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert read_public_key(secret.with_suffix(".pub")) == read_key_pair(secret).owner
    assert names(tmp_path) == [("actor", "actor-0"), ("operator", "operator")]


def test_later_actors_are_appended_and_the_learner_keeps_its_key(tmp_path: Path) -> None:
    make_keys(tmp_path, ["learner", "actor-0"])
    before = (tmp_path / "learner.key").read_text()
    # As an editor may leave it.
    (tmp_path / "allowed_keys").write_text((tmp_path / "allowed_keys").read_text().rstrip("\n"))
    make_keys(tmp_path, ["learner", "actor-1"], ["me"])
    assert (tmp_path / "learner.key").read_text() == before
    assert names(tmp_path) == [("actor", "actor-0"), ("operator", "operator"), ("actor", "actor-1"), ("operator", "me")]


def test_nothing_is_overwritten_and_nothing_written_by_halves(tmp_path: Path) -> None:
    make_keys(tmp_path, ["actor-0"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SettingError, match="never overwritten"):
        make_keys(tmp_path, ["actor-1", "actor-0"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["", "*", "a*b", "../a", "a/b", "a b", ".a", "é", "-a", "a\nb"])
def test_name_that_cannot_be_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError, match="cannot be the name"):
        make_keys(tmp_path / "keys", [name])
    assert not (tmp_path / "keys").exists()


def test_two_services_of_one_file_name_are_refused(tmp_path: Path) -> None:
    for actors, operators in ((["a", "a"], []), (["gpu", "gpu-*"], []), (["me"], ["me"]), (["operator"], [])):
        with pytest.raises(SettingError, match="one key file"):
            make_keys(tmp_path / "keys", actors, operators)
    assert not (tmp_path / "keys").exists()


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r'FOLDER = ".*/file/keys": the folder cannot be written \(Not a directory\)'):
        make_keys(tmp_path / "file" / "keys", ["actor-0"])


@pytest.mark.slow
def test_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    assert keygen(tmp_path, "keys", "actor-0").returncode == 0
    result = keygen(tmp_path, "keys", "actor-0")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith('error: NAME = "actor-0": keys/actor-0.key exists')
