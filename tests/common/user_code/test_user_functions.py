"""A user's module that raises or exits when it is imported is reported in words, and never ends the program."""

from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.user_code.functions import load_function


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import sys\nsys.exit()\n", "SystemExit"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
        ("raise SystemExit('usage: my_rewards DATA')\n", "SystemExit: usage: my_rewards DATA"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import nothere\n", "ModuleNotFoundError: No module named 'nothere'"),
        ("import os\ndef f(:\n", "SyntaxError: invalid syntax (/"),
    ],
)
def test_a_module_that_ends_the_program_when_imported_is_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"ending_{abs(hash(source))}"
    Path(f"{name}.py").write_text(source)
    with pytest.raises(SettingError) as raised:
        load_function(f"{name}:reward", setting="task.reward", parameters=("prompt", "completion", "row"))
    assert f"importing it raised {words}" in str(raised.value)
    assert f"{name}.py:{len(source.splitlines())})" in str(raised.value)
    assert ("Install 'nothere'" in str(raised.value)) == ("nothere" in source)


def test_function_of_the_main_script_is_refused_with_the_cure() -> None:
    with pytest.raises(SettingError, match=r"Put it into a file, my_code\.py, and name it my_code:reward\."):
        load_function("__main__:reward", setting="task.reward")
