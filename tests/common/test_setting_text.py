"""Secrets in engine options are masked where settings are shown, and reach the service."""

import os
import stat
from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.formats import MASK, is_secret, masked, write_private
from offbeat.common.settings.loading import load, refuse_masked, resolved_toml, setting_text

OPTIONS = 'actor.engine_options={hf_token = "hf_real", max_num_batched_tokens = 512, deep = {api_key = "real too"}}'


@pytest.mark.parametrize(
    "name",
    ["hf_token", "HF_TOKEN", "api_key", "apiKey", "aws-secret-access-key", "password", "db_passwd", "auth", "credentials"],
)
def test_name_of_a_secret_is_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["tokenizer", "tokenizer_mode", "max_num_batched_tokens", "num_tokens", "monkey", "author", "keys", "dtype", ""]
)
def test_name_of_another_option_is_no_secret(name: str) -> None:
    assert not is_secret(name)


def test_every_text_below_a_secret_name_is_masked_and_nothing_else() -> None:
    value = {"token": ["a", {"x": "b"}], "dtype": "c", "eos_token_id": 7, "hf_token": True, "password": ""}
    assert masked(value) == {"token": [MASK, {"x": MASK}], "dtype": "c", "eos_token_id": 7, "hf_token": True, "password": ""}


def test_secret_is_masked_in_every_text_of_the_settings() -> None:
    config = load(None, [OPTIONS])
    for text in (resolved_toml(config), setting_text(config, "actor.engine_options")):
        assert "real" not in text
        assert "512" in text
    assert 'hf_token" = "hf_real"' in resolved_toml(config, with_secrets=True)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("actor.engine_options.hf_token", "hf_real"), ("actor.engine_options", {"hf_token": "hf_real"})],
)
def test_error_about_a_secret_does_not_show_it(setting: str, value: object) -> None:
    text = str(SettingError(setting, value, "it is wrong", "Correct it."))
    assert "hf_real" not in text
    assert MASK in text
    assert "keys/learner.key" in str(SettingError("hub.key", "keys/learner.key", "it is wrong", "Correct it."))


def test_masked_settings_read_back_are_refused_by_a_service_and_the_real_ones_are_not(tmp_path: Path) -> None:
    config = load(None, [OPTIONS])
    path = tmp_path / "config.toml"
    path.write_text(resolved_toml(config))
    with pytest.raises(SettingError, match=r"actor\.engine_options .* masked"):
        refuse_masked(load(path))
    write_private(path, resolved_toml(config, with_secrets=True))
    refuse_masked(load(path))
    assert load(path) == config


def test_private_file_can_be_read_by_its_owner_only_even_if_it_was_public(tmp_path: Path) -> None:
    for path in (tmp_path / "new.toml", tmp_path / "old.toml"):
        if path.name == "old.toml":
            path.write_text("public")
            path.chmod(0o644)
        before = os.umask(0)
        try:
            write_private(path, "secret")
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text() == "secret"
