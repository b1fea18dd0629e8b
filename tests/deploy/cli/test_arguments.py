"""Claims about the arguments that commands share: lists of values, and which argument is the config file."""

from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.deploy.cli.arguments import read_run, say_page, split_arguments, split_list, split_numbers


def test_list_has_no_blanks_and_no_empty_parts_and_each_part_once() -> None:
    assert split_list(" gate, drop,,abort, gate ") == ["gate", "drop", "abort"]
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


def test_folder_whose_learner_has_not_started_is_no_mistake_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "launch.toml").touch()
    with pytest.raises(SettingError, match=r"there is no run in it yet.*Try again in a moment"):
        read_run([str(tmp_path)])


def test_name_of_a_run_that_is_not_there_is_no_mistake_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"RUN = .*there is no such folder. Name the folder of a run, or its TOML file"):
        read_run([str(tmp_path / "absent")])


def test_page_that_was_written_is_printed_alone_and_said_how_to_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say_page(tmp_path / "page.html")
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}/page.html\n"
    assert said.err == f"wrote {tmp_path}/page.html; open it in a browser: file://{tmp_path}/page.html\n"
