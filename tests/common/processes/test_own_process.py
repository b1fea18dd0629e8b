"""A forked process shows the command line and the variables that it goes on with."""

import os
import subprocess
import sys

import pytest

from offbeat.common.processes import own_process
from offbeat.common.processes.own_process import ROOM, ROOM_VARIABLE

SCRIPT = """
import os, subprocess, sys, threading
from offbeat.common.processes import own_process
from offbeat.common.processes import process_table as processes

print(own_process.has_room_for_variable(), own_process.has_threads())
child = os.fork()
if not child:
    own_process.show_variable("MARK", "17")
    own_process.show_arguments(["worker", "3"])
    print(processes.marked("MARK", "17") == [os.getpid()], processes.arguments(os.getpid())[:2], os.environ["MARK"])
    grandchild = os.fork()
    if not grandchild:
        print(os.getpid() in processes.marked("MARK", "17"), own_process.has_room_for_variable())
        sys.stdout.flush()
        print(subprocess.check_output(["env"]).decode().count("OFFBEAT_ROOM"))
    else:
        os.waitpid(grandchild, 0)
    sys.exit()
os.waitpid(child, 0)
print(processes.marked("MARK", "17"), os.environ.get("MARK"))
threading.Thread(target=os.read, args=(os.pipe()[0], 1), daemon=True).start()
print(own_process.has_threads())
sys.stdout.flush()
os._exit(0)
"""


def test_fork_shows_its_own_command_line_and_variable_which_its_forks_inherit() -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), ROOM_VARIABLE: ROOM}
    command = [sys.executable, "-u", "-c", SCRIPT, "-" * 20]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["True False", "True ['worker', '3'] 17", "True False", "0", "[] None", "True"]


def test_process_without_room_can_show_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set after the start, where the kernel does not look.
    monkeypatch.setenv(ROOM_VARIABLE, ROOM)
    assert not own_process.has_room_for_variable()
