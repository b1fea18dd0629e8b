"""Mistakes in `hub.key`, `hub.learner_key` and `hub.allowed_keys` are reported by setting before anything connects."""

from pathlib import Path
from typing import Literal

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import HubSection
from offbeat.common.settings.hub_keys import keys_of_learner, keys_of_peer
from offbeat.protocols.keys import KeyPair, make_key_pair, public_text, secret_text


def write(folder: Path, key: KeyPair) -> None:
    path = folder / f"{key.owner.name}.key"
    path.write_text(secret_text(key))
    path.chmod(0o600)
    path.with_suffix(".pub").write_text(public_text(key.owner))


@pytest.fixture
def hub(tmp_path: Path) -> HubSection:
    for key in (make_key_pair("learner", "learner"), make_key_pair("operator", "operator"), make_key_pair("actor", "a")):
        write(tmp_path, key)
    (tmp_path / "allowed_keys").write_text("")
    return section(tmp_path)


def section(
    folder: Path, key: str = "{name}.key", learner_key: str = "learner.pub", allowed_keys: str = "allowed_keys"
) -> HubSection:
    return HubSection(key=str(folder / key), learner_key=str(folder / learner_key), allowed_keys=str(folder / allowed_keys))


def test_without_settings_there_are_no_keys() -> None:
    assert keys_of_learner(HubSection()) is None
    assert keys_of_peer(HubSection(), "a") is None


def test_one_config_gives_each_service_its_own_key(hub: HubSection) -> None:
    learner = keys_of_learner(hub)
    assert learner is not None
    services: list[tuple[str, Literal["actor", "operator"]]] = [("a", "actor"), ("operator", "operator")]
    for name, role in services:
        keys = keys_of_peer(hub, name, role)
        assert keys is not None
        assert keys.key.owner.name == name
        assert keys.learner_key == learner.key.owner


def test_actor_without_a_key_file_is_told_which(hub: HubSection) -> None:
    with pytest.raises(SettingError, match=r'hub\.key = ".*/b\.key": there is no such file.*offbeat keygen'):
        keys_of_peer(hub, "b")


def test_actor_of_another_name_than_its_key_is_told_before_the_learner_refuses_it(hub: HubSection, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"actor\.name = \"b\": the key file .*a\.key is for 'a'"):
        keys_of_peer(section(tmp_path, key="a.key"), "b")


@pytest.mark.parametrize("key", ["a.key", "operator.key"])
def test_learner_with_the_key_of_somebody_else_is_refused(hub: HubSection, tmp_path: Path, key: str) -> None:
    with pytest.raises(SettingError, match=r"hub\.key.*this is the learner"):
        keys_of_learner(section(tmp_path, key=key))


def test_learner_key_of_somebody_else_is_refused(hub: HubSection, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"hub\.learner_key.*key of the actor a"):
        keys_of_peer(section(tmp_path, learner_key="a.pub"), "a")


def test_missing_companions_are_named(hub: HubSection, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"hub\.learner_key.*no such file"):
        keys_of_peer(section(tmp_path, learner_key="absent"), "a")
    with pytest.raises(SettingError, match=r"hub\.allowed_keys.*no such file"):
        keys_of_learner(section(tmp_path, allowed_keys="absent"))


def test_actor_needs_no_allow_list_and_learner_no_copy_of_its_public_key(hub: HubSection, tmp_path: Path) -> None:
    (tmp_path / "allowed_keys").unlink()
    assert keys_of_peer(hub, "a") is not None
    (tmp_path / "allowed_keys").write_text("")
    (tmp_path / "learner.pub").unlink()
    assert keys_of_learner(hub) is not None
