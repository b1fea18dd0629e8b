"""Without descriptors a hub or a link says so, and the command line too; ZeroMQ alone would abort the process."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.deploy.cli import main as cli
from offbeat.protocols.keys import make_key_pair, public_text

OPEN_WITH = """
import os, resource, sys
from pathlib import Path
from offbeat.protocols.addresses import ChannelError
from offbeat.protocols.channels import DESCRIPTORS_PER_SOCKET, Hub, Link
from offbeat.protocols.keys import AllowList, HubKeys, make_key_pair

keys = HubKeys(make_key_pair("learner", "main"), AllowList(Path(sys.argv[1])))
sockets = {
    "hub": lambda: Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 20),
    "keyed hub": lambda: Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 20, keys=keys),
    "link": lambda: Link("tcp://127.0.0.1:9", identity=b"a", max_message_bytes=1 << 20),
}
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for name, open_socket in sockets.items():
    for num_spare in (0, 2, 7, 9, DESCRIPTORS_PER_SOCKET - 1, DESCRIPTORS_PER_SOCKET):
        num_open = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + num_spare, hard))
        try:
            open_socket().close()
            print(name, num_spare - DESCRIPTORS_PER_SOCKET, "opened")
        except ChannelError as error:
            assert "too few file descriptors" in str(error) and "ulimit -n" in str(error), error
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert len(os.listdir("/proc/self/fd")) - 1 == num_open
"""


def test_socket_is_opened_with_enough_descriptors_and_refused_with_fewer(tmp_path: Path) -> None:
    (tmp_path / "allowed").write_text(public_text(make_key_pair("actor", "a").owner))
    command = [sys.executable, "-c", OPEN_WITH, str(tmp_path / "allowed")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["hub 0 opened", "keyed hub 0 opened", "link 0 opened"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_command_that_finds_no_descriptor_ends_with_the_cure(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "metrics.jsonl")

    monkeypatch.setattr(cli, "make_app", lambda: fail)
    with pytest.raises(SystemExit) as ended:
        cli.run()
    said = capsys.readouterr().err
    assert ended.value.code == 3
    assert said.startswith("error: ") and "metrics.jsonl" in said and "ulimit -n" in said


def test_other_errors_of_the_system_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(cli, "make_app", lambda: fail)
    with pytest.raises(OSError, match="Input/output"):
        cli.run()


def test_every_command_begins_with_the_hard_limit() -> None:
    code = (
        "import resource as r, sys; hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (256, hard))\n"
        "from offbeat.common.processes.files import MOST; from offbeat.deploy.cli import main as cli\n"
        "cli.make_app = lambda: lambda: print(r.getrlimit(r.RLIMIT_NOFILE)[0] == min(hard, MOST))\n"
        "cli.run()"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == "True\n"
