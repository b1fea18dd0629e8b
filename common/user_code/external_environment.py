"""Environments with a Python of their own: the interpreter, which may be made for them, its command line, and their rows.

    environment.requirements -> a virtual environment in the cache, made once -> python host.py task.environment
    learner <- rows              data.train_data = "task-environment:train?size=2000"
    actor's environment process <-> episodes (`actor/environments/external.py`)

`environment_host/host.py` runs in that Python. Its docstring has the messages.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from offbeat.common.errors import SettingError
from offbeat.common.processes.files import cache_folder
from offbeat.common.settings.config import Environment

logger = logging.getLogger(__name__)

HOST = Path(__file__).with_name("environment_host") / "host.py"
ROWS_S = 1800.0
"""Longest time in which an environment sends its rows: it may load a dataset first."""
INSTALL_S = 3600.0
"""Longest time in which the packages of `environment.requirements` are installed."""
READY_FILE = "offbeat-ready"
"""A file in a virtual environment that is complete."""
_ROWS = re.compile(r"task-environment:(?P<split>\w+)(?:\?(?P<options>\S+))?")
_REQUIREMENTS = "environment.requirements"


class HostMessage(msgspec.Struct, frozen=True):
    """A message of the host before the first episode."""

    type: str
    text: str = ""
    row: dict[str, Any] = {}


def host_command(environment: Environment) -> list[str]:
    """Return the command of the host. Makes its Python first if there is none yet. Raises `SettingError`."""
    return [interpreter(environment), str(HOST), environment.function, json.dumps(dict(environment.arguments))]


def host_variables(secrets: str = "") -> dict[str, str]:
    """Return the environment variables of the host: this process's, without those of offbeat and the one named `secrets`.

    The mark by which processes that have left the session are found again stays.
    """
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("OFFBEAT_") or name == "OFFBEAT_GUARD"
    }
    variables.pop(secrets, None)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        variables.pop(name, None)
    return variables


def interpreter(environment: Environment) -> str:
    """Return the environment's Python; make it first where requirements are named. Raise `SettingError`."""
    base = environment.python or sys.executable
    if environment.python and shutil.which(base) is None:
        problem = "there is no such program, or it may not be run"
        raise SettingError("environment.python", base, problem, "Give the path of a Python, such as .venv/bin/python.")
    if not environment.requirements:
        return base
    file = Path(environment.requirements).expanduser()
    try:
        content = file.read_bytes()
    except OSError as error:
        problem = f"the file cannot be read ({error.strerror})"
        raise SettingError(_REQUIREMENTS, str(file), problem, "Give a file with a requirement on each line.") from error
    digest = hashlib.sha256(b"\0".join([content, str(Path(base).resolve()).encode()])).hexdigest()[:16]
    folder = cache_folder() / f"environment-{digest}"
    if not (folder / READY_FILE).exists():
        _make(folder, base, file)
    return str(folder / "bin" / "python")


def _make(folder: Path, base: str, requirements: Path) -> None:
    """Make a virtual environment; other processes that want the same one wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / READY_FILE).exists():
            return
        logger.info("installing the packages of %s into %s", requirements, folder)
        started = time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        python = str(folder / "bin" / "python")
        if uv := shutil.which("uv"):
            commands = [
                [uv, "venv", "--quiet", "--python", base, str(folder)],
                [uv, "pip", "install", "--quiet", "--python", python, "--requirement", str(requirements)],
            ]
        else:
            commands = [
                [base, "-m", "venv", str(folder)],
                [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement", str(requirements)],
            ]
        for command in commands:
            _run(command, requirements)
        (folder / READY_FILE).touch()
        logger.info("installed in %.0f s", time.monotonic() - started)


def _run(command: list[str], requirements: Path) -> None:
    try:
        done = subprocess.run(
            command, env=host_variables(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=INSTALL_S, check=False,
        )  # fmt: skip
        failure, output = f"exit status {done.returncode}" if done.returncode else "", done.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        failure, output = str(error), b""
    if failure:
        said = " ".join(output.decode(errors="replace").split())[-600:]
        problem = f"its packages cannot be installed ({Path(command[0]).name}: {failure}; {said})"
        raise SettingError(_REQUIREMENTS, str(requirements), problem, "Correct the file, or install into environment.python.")


# Rows


def is_environment_rows(source: str) -> bool:
    """Return whether a data setting asks the environment for its rows."""
    return _ROWS.fullmatch(source) is not None


def environment_rows(environment: Environment, source: str, setting: str) -> Iterator[dict[str, Any]]:
    """Yield the rows that an environment has; raise `SettingError` about `setting`.

    `source` is `task-environment:SPLIT`, with the options `size` and `skip`. An environment whose rows do not end needs a size.
    """
    match = _ROWS.fullmatch(source)
    assert match is not None
    if not environment.is_external:
        problem = "task.environment runs in offbeat's own Python, and offers no rows"
        raise SettingError(setting, source, problem, "Name a file or a function, or set environment.python.")
    parts = str(match["options"] or "").split("&")
    options = {name: value for name, _, value in (part.partition("=") for part in parts if part)}
    if not options.keys() <= {"size", "skip"} or not all(value.isdecimal() for value in options.values()):
        cure = 'Write "task-environment:train?size=2000&skip=64".'
        raise SettingError(setting, source, "its options are size and skip, whole numbers", cure)
    wish = {
        "type": "rows",
        "split": match["split"],
        "skip": int(options.get("skip", 0)),
        "size": int(options["size"]) if "size" in options else None,
    }
    for message in _ask(environment, wish):
        if message.type == "problem":
            raise SettingError(setting, source, f"the environment gave no rows: {message.text}", "Correct the environment.")
        if message.type == "row":
            yield message.row
        if message.type == "rows_end":
            return
    raise SettingError(setting, source, "the environment's process ended before its last row", "Its output is above.")


def check_external(environment: Environment) -> None:
    """Load an environment once in its Python; raise `SettingError` when it cannot be."""
    for message in _ask(environment, None):
        require_ready(environment, message.type, message.text)
        return
    raise SettingError("task.environment", environment.function, "its process ended at once", "Its output is above.")


def require_ready(environment: Environment, kind: str, text: str) -> None:
    """Raise `SettingError` unless the host's first message says that it is ready."""
    if kind != "ready":
        where = environment.requirements or environment.python or sys.executable
        problem = f"in its Python ({where}) it cannot be loaded: {text}"
        raise SettingError("task.environment", environment.function, problem, "Correct it, or install what it needs there.")


def _ask(environment: Environment, wish: dict[str, Any] | None) -> Iterator[HostMessage]:
    """Start a host, send it one message, and yield its own until it ends."""
    command = host_command(environment)
    process = subprocess.Popen(
        command, env=host_variables(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    limit = threading.Timer(ROWS_S, process.kill)
    limit.daemon = True
    limit.start()
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            if wish is not None:
                process.stdin.write(msgspec.json.encode(wish) + b"\n")
        for line in process.stdout:
            try:
                # Python's own JSON, as the host writes it: rows of tables have NaN for numbers that are missing.
                message = msgspec.convert(json.loads(line), HostMessage)
            except (msgspec.MsgspecError, ValueError) as error:
                shown = line[:80].decode(errors="replace").strip()
                problem = f"the program has written {shown!r} instead of a message ({error})"
                raise SettingError("environment.python", command[0], problem, "Give the path of a Python.") from error
            yield message
    finally:
        limit.cancel()
        process.kill()
        process.stdout.close()
        process.wait()
