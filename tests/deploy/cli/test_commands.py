"""Claims about the commands as `offbeat` lists and loads them."""

import ast
import errno
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from offbeat.common.errors import LostProcessError
from offbeat.common.processes.shutdown import GAVE_UP_STATUS, USER_ERROR_STATUS
from offbeat.common.records.run_folder import naming_disk_errors
from offbeat.common.settings.loading import explain
from offbeat.deploy import cli
from offbeat.deploy.cli.main import PANELS, make_app, run

MAIN = "offbeat.deploy.cli.main"
COMMAND = re.compile(r"\ndef ([a-z]+)_command\(")
LIGHT_HELP = """
import sys
from typer.testing import CliRunner
from offbeat.deploy.cli.main import make_app

assert CliRunner().invoke(make_app(), ["--help"]).exit_code == 0
heavy = {"torch", "numpy", "scipy", "zmq", "plotly", "vllm"} & set(sys.modules)
assert not heavy, heavy
loaded = {name for name in sys.modules if name.startswith(("offbeat.deploy.cli", "offbeat.lab", "offbeat.learner"))}
assert loaded == {"offbeat.deploy.cli", "offbeat.deploy.cli.main"}, loaded
"""


def test_every_command_is_listed() -> None:
    folder = Path(str(cli.__file__)).parent
    written = {(file.stem, name) for file in folder.glob("*.py") for name in COMMAND.findall(file.read_text())}
    assert written == {(panel.module, name) for panel in PANELS for name in panel.commands}


@pytest.mark.slow
def test_help_imports_no_command_and_no_heavy_library() -> None:
    result = subprocess.run([sys.executable, "-c", LIGHT_HELP], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_texts_of_help_have_no_brackets_that_the_terminal_takes_for_a_style() -> None:
    """Typer reads `[lora]` as markup and leaves it out."""
    files = Path(str(cli.__file__)).parent.glob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    taken = [text for text in texts if re.search(r"(?<!\\)\[[a-z]+\]", text)]
    assert taken == []


@pytest.mark.parametrize("name", ["check", "set", "keygen"])
def test_list_says_of_a_command_what_its_own_help_says(name: str) -> None:
    runner = CliRunner(env={"COLUMNS": "500", "TERMINAL_WIDTH": "500"})
    listed = next(line for line in runner.invoke(make_app(), ["--help"]).output.splitlines() if f"│ {name} " in line)
    summary = listed.strip("│ ").removeprefix(name).strip()
    assert summary
    assert summary in runner.invoke(make_app(), [name, "--help"]).output


def test_misspelled_command_is_refused_with_the_one_that_was_meant() -> None:
    result = CliRunner().invoke(make_app(), ["trian"])
    assert result.exit_code == 2
    assert "'train'" in result.output


def test_version_is_told_without_a_command() -> None:
    result = CliRunner().invoke(make_app(), ["--version"])
    assert (result.exit_code, result.output) == (0, f"offbeat {importlib.metadata.version('offbeat')}\n")


@pytest.mark.parametrize("command", [["explain"], ["check", "--explain"]])
def test_settings_that_are_named_are_explained_and_no_others(command: list[str]) -> None:
    result = CliRunner().invoke(make_app(), [*command, "max_staleness", "run.seed"])
    assert result.output == f"{explain('staleness.max_staleness')}\n\n{explain('run.seed')}\n"
    assert CliRunner().invoke(make_app(), command).output == f"{explain()}\n"


def test_shell_completes_commands_and_their_options() -> None:
    def completed(words: str) -> list[str]:
        variables = {"_OFFBEAT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return CliRunner(env=variables).invoke(make_app(), prog_name="offbeat").output.split()

    assert completed("offbeat sam") == ["samples"]
    assert {"--worst", "--best", "--step"} <= set(completed("offbeat samples --"))


@pytest.mark.parametrize(
    ("number", "limit"), [(errno.EMFILE, "open files (ulimit -n)"), (errno.EFBIG, "the size of files (ulimit -f)")]
)
def test_limit_of_the_system_is_told_in_one_line(
    number: int, limit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        with naming_disk_errors(Path("run")):
            raise OSError(number, os.strerror(number), "run/log/00000001.log")

    monkeypatch.setattr(sys, "argv", ["offbeat"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        run(app)
    assert ended.value.code == GAVE_UP_STATUS
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith(f"'run/log/00000001.log': raise the limit on {limit}")


def test_folder_that_was_deleted_is_named_whatever_error_it_has_led_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise RuntimeError("a pool is broken")

    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    monkeypatch.setattr(sys, "argv", ["offbeat"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        run(app)
    assert ended.value.code == USER_ERROR_STATUS
    assert capsys.readouterr().err == "error: the current folder was deleted: change to another one\n"


def test_loss_of_a_process_is_told_in_one_line_and_a_launcher_may_start_the_service_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise LostProcessError("a process was lost")

    monkeypatch.setattr(sys, "argv", ["offbeat"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        run(app)
    assert ended.value.code not in (0, GAVE_UP_STATUS, USER_ERROR_STATUS)
    assert capsys.readouterr().err == "error: a process was lost\n"


@pytest.mark.slow
def test_file_that_hides_a_module_of_python_is_named_beside_the_error(tmp_path: Path) -> None:
    (tmp_path / "logging.py").write_text("")
    ended = subprocess.run(
        [sys.executable, "-P", "-m", MAIN, "explain"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert f"note: {tmp_path}/logging.py hides Python's own module of this name" in ended.stderr


@pytest.mark.slow
def test_deleted_folder_is_told_in_one_line(tmp_path: Path) -> None:
    command = f'rmdir "{tmp_path}" && exec {sys.executable} -m {MAIN} check model.path=m data.train_data=d.jsonl'
    ended = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1] == "error: the current folder was deleted: change to another one"
    assert "Traceback" not in ended.stderr and ended.returncode == USER_ERROR_STATUS


def test_standard_streams_that_were_closed_are_opened_again() -> None:
    opened = "import os; from offbeat.common.processes.files import open_standard_streams as run; run(); print(1); "
    command = f"{sys.executable} -c '{opened}os.write(2, str(os.open(\"/\", 0)).encode())' <&- >&-"
    # The next file has a number of its own.
    assert subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stderr == "3"


@pytest.mark.slow
def test_characters_that_the_terminal_has_not_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "größer").mkdir()
    (tmp_path / "größer" / "metrics.jsonl").write_text('{"kind":"event","time":1.0,"event":"run_started","detail":""}\n')
    command = [sys.executable, "-m", MAIN, "runs", str(tmp_path)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert r"gr\xf6\xdfer" in listed.stdout, listed.stderr
    listed = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=False)
    assert [Path(run["folder"]).name for run in json.loads(listed.stdout)] == ["größer"]
