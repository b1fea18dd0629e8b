"""Claims about the arguments that commands share: lists of values, and which argument is the config file."""

from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.deploy.cli.arguments import split_arguments, split_list, split_numbers


def test_list_has_no_blanks_and_no_empty_parts() -> None:
    assert split_list(" gate, drop,,abort ") == ["gate", "drop", "abort"]
    assert split_list("") == []


def test_numbers_are_read_in_the_order_given() -> None:
    assert split_numbers("--staleness", "8, 0,2", at_least=0) == [8, 0, 2]
    assert split_numbers("--staleness", "", at_least=0) == []


@pytest.mark.parametrize(
    ("text", "said"), [("4,x", "whole numbers"), ("4,1.5", "whole numbers"), (",", "no number"), ("4,0", "below 1")]
)
def test_what_is_no_list_of_numbers_is_refused_by_its_option(text: str, said: str) -> None:
    with pytest.raises(SettingError, match=f"--actors.*{said}"):
        split_numbers("--actors", text, at_least=1)


def test_first_argument_is_the_config_file_unless_it_is_a_setting(tmp_path: Path) -> None:
    assert split_arguments(None) == (None, [])
    assert split_arguments(["run.toml", "train.num_steps=3"]) == (Path("run.toml"), ["train.num_steps=3"])
    assert split_arguments(["train.num_steps=3"]) == (None, ["train.num_steps=3"])
    file = tmp_path / "seed=1.toml"
    file.touch()
    assert split_arguments([str(file)]) == (file, [])
