"""No program gets out of the sandbox. Every attack is tried without it first, where it succeeds, and then inside."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from offbeat.actor.sandbox import Local, run_sync, use

pytestmark = pytest.mark.slow

ATTACKS = {
    "reads the answers": "open(answers).read()",
    "reads a folder": "os.listdir(os.path.dirname(answers))",
    "reads the password file": "open('/etc/passwd').read()",
    "reads the environment of a process": "open(f'/proc/{victim}/environ').read()",
    "reads the command line of a process": "open(f'/proc/{victim}/cmdline').read()",
    "has the secrets of the run": "os.environ['RUN_SECRET']",
    "writes beside its folder": "open(os.path.join(os.path.dirname(answers), 'written'), 'w').write('x')",
    "writes to the answers": "open(answers, 'a').write('x')",
    "truncates the answers": "os.truncate(answers, 0)",
    "hides the answers": "os.chmod(answers, 0o600)",
    "dates the answers": "os.utime(answers)",
    "writes to shared memory": "open(f'/dev/shm/offbeat-{victim}', 'w').close()",
    "connects": "socket.create_connection(('127.0.0.1', port), 1)",
    "connects by UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "asks the kernel about networks": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "connects to a path": "s = socket.socket(socket.AF_UNIX); s.connect(path)",
    "connects a pair of datagram sockets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "kills a process": "os.kill(victim, signal.SIGCONT)",
    "kills through a descriptor": "signal.pidfd_send_signal(os.pidfd_open(victim), signal.SIGCONT)",
    "makes the kernel kill": "fcntl.fcntl(0, fcntl.F_SETOWN, victim)",
    "limits a process": "resource.prlimit(victim, resource.RLIMIT_CORE, (0, 0))",
    "slows a process": "os.setpriority(os.PRIO_PROCESS, victim, 5)",
    "pins a process": "os.sched_setaffinity(victim, os.sched_getaffinity(victim))",
    "starts a process": "os._exit(0) if os.fork() == 0 else os.wait()",
    "starts a program": "subprocess.run([sys.executable, '-S', '-c', ''], check=True)",
    "leaves a daemon": "os._exit(0) if os.fork() == 0 and (os.setsid() or os.fork() or 1) else os.wait()",
    "has memory without addresses": "os.memfd_create('hidden')",
    "kills itself as if from outside": "control or os.kill(os.getpid(), signal.SIGKILL)",
    "has a timer that may kill": "call(libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())))",
    "raises its limits": "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.RLIM_INFINITY))",
    "outlives its parent": "call(libc.prctl(1, 0, 0, 0, 0))",
    "holds descriptors of its parent": "[os.fstat(number) for number in range(3, 64) if is_open(number)][0]",
    "reads what is installed": "open(installed).read()",
    # The last one: a signal would stop the process from here on.
    "is traced": "call(libc.ptrace(0, 0, 0, 0))",
}
"""Python that raises where the attack fails."""

PROGRAM = """
import ctypes, fcntl, json, os, resource, signal, socket, subprocess, sys
globals().update(json.loads(sys.stdin.read()))
libc = ctypes.CDLL(None, use_errno=True)

def call(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "denied")

def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False

for name, attack in attacks.items():
    try:
        exec(attack)
    except Exception:
        continue
    print(name, flush=True)
"""


class Target(NamedTuple):
    """A folder to attack, and the names of the targets, which a program reads from its standard input."""

    folder: Path
    stdin: str


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("target")
    (folder / "answers.jsonl").write_text("42")
    with (
        pytest.MonkeyPatch.context() as patch,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
        subprocess.Popen(["sleep", "60"]) as victim,
    ):
        patch.setenv("RUN_SECRET", "secret")
        local.bind(str(folder / "socket"))
        local.listen()
        names = {
            "answers": str(folder / "answers.jsonl"),
            "path": str(folder / "socket"),
            "port": server.getsockname()[1],
            "victim": victim.pid,
            "installed": pytest.__file__,
            "attacks": ATTACKS,
            "control": False,
        }
        yield Target(folder, json.dumps(names))
        victim.kill()


@pytest.fixture(scope="session")
def succeeded(box: Local, target: Target) -> set[str]:
    use(box)
    result = run_sync(PROGRAM, stdin=target.stdin)
    assert result.exit_code == 0, result
    return set(result.stdout.splitlines())


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_succeeds(attack: str, succeeded: set[str]) -> None:
    assert attack not in succeeded


def test_attacks_succeed_without_a_sandbox(target: Target) -> None:
    names = {**json.loads(target.stdin), "control": True}
    with open("/dev/null") as held:  # noqa: PTH123, a descriptor that is passed on
        command = [sys.executable, "-c", PROGRAM]
        result = subprocess.run(
            command, input=json.dumps(names), capture_output=True, text=True, pass_fds=[held.fileno()], timeout=60
        )
    # Now, not with the fixture: a test session beside this one that ends takes the file for a leak of its own.
    Path(f"/dev/shm/offbeat-{names['victim']}").unlink(missing_ok=True)
    assert result.stdout.splitlines() == list(ATTACKS)
