"""`offbeat environments` lists what is here, and `offbeat new environment` writes a folder that works."""

import ast
import errno
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.common.errors import SettingError
from offbeat.common.settings.checks import check
from offbeat.common.settings.loading import load
from offbeat.common.user_code.environment_function import load_environment
from offbeat.deploy.cli.main import make_app
from offbeat.deploy.local.environments import find_environments, write_environment

pytestmark = pytest.mark.slow  # starts commands


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def test_new_environment_passes_its_own_test_and_the_checks_of_settings(folder: Path) -> None:
    result = CliRunner().invoke(make_app(), ["new", "environment", "word_shop"])
    assert result.exit_code == 0, result.output
    assert "offbeat train word_shop/run.toml" in result.output
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "word_shop"]
    played = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "3 passed" in played.stdout, played.stdout
    config = load(folder / "word_shop" / "run.toml")
    check(config)
    assert callable(load_environment(config.task.environment))


def test_new_environment_overwrites_nothing(folder: Path) -> None:
    (folder / "shop").mkdir()
    with pytest.raises(SettingError, match=r'NAME = "shop": there is such a file or folder'):
        write_environment("shop")
    with pytest.raises(SettingError, match=r'NAME = "my-shop".*name of a folder of Python modules'):
        write_environment("my-shop")
    assert not list((folder / "shop").iterdir())


@pytest.mark.parametrize("name", ["lambda", "email", "offbeat"])
def test_new_environment_hides_no_module_of_python(name: str) -> None:
    with pytest.raises(SettingError, match=rf'NAME = "{name}": Python has a keyword or a module of this name'):
        write_environment(name)
    assert not Path(name).exists()


def test_new_environment_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(SettingError, match=r'NAME = "shop": it cannot be written here \(Permission denied\)'):
        write_environment("shop")


def test_functions_of_the_folder_are_listed_with_the_line_that_uses_them(folder: Path) -> None:
    write_environment("shop")
    (folder / "broken.py").write_text("def (:")
    (folder / "other.py").write_text("async def helper(chat):\n    pass\n")
    of_folder = [one for one in find_environments("") if one.setting.startswith("task.environment")]
    lines = [line for one in of_folder for line in one.setting.splitlines() if "shop" in line or "other" in line]
    assert lines == ['task.environment = "shop.environment:play"']
    assert tomllib.loads(lines[0]) == {"task": {"environment": "shop.environment:play"}}


def test_another_python_is_asked_for_frameworks_and_their_environments(folder: Path) -> None:
    """A stand-in for a Python that has verifiers and an environment of it."""
    python = folder / "python"
    python.write_text(
        '#!/bin/sh\necho \'[["verifiers", "0.4.0", []], ["word-count", "0.1", ["verifiers", "datasets"]], ["x", "1", []]]\'\n'
    )
    python.chmod(0o755)
    found = {one.name: one.setting for one in find_environments(str(python))}
    assert found["word-count"] == f'task.environment = "verifiers:word-count"\nenvironment.python = "{python}"'
    assert "verifiers" in found
    assert "x" not in found
    listed = CliRunner().invoke(make_app(), ["environments", "--python", str(python)]).output
    assert "without a package here: gymnasium, harbor, nemo_gym, openenv\n" in listed
    with pytest.raises(SettingError, match=r'--python = "/no/python"'):
        find_environments("/no/python")


def test_what_a_broken_installation_has_left_is_no_package(folder: Path) -> None:
    (folder / "broken-1.0.dist-info").mkdir()
    (folder / "broken-1.0.dist-info" / "METADATA").touch()
    assert "broken" not in [one.name for one in find_environments("")]


def test_written_files_are_formatted_python(folder: Path) -> None:
    for file in write_environment("shop").glob("*.py"):
        ast.parse(file.read_text())
