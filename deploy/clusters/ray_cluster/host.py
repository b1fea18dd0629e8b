"""An actor's process on a node of a Ray cluster, held by an object of Ray that ends with it."""

import os
import signal
import subprocess
import sys
import threading
from typing import Literal, NamedTuple

from offbeat.common.processes.shutdown import PARENT_VARIABLE

PROGRAM = (sys.executable, "-m", "offbeat.deploy.cli.main")
"""The command `offbeat` of the node's environment, as the node itself knows it."""


class Meeting(NamedTuple):
    """The learner as an actor on another machine gets to know it."""

    address: str
    """The learner's `tcp://HOST:PORT`, or the file that tells it."""
    key: str | None
    """The actors' secret key; None where the run has no keys."""
    learner_key: str | None
    """The learner's public key."""


class Host:
    """The holder of one actor's process: Ray gives it a node with room, and takes the room back when the process has ended."""

    def __init__(self, name: str, meeting: Meeting) -> None:
        command = [*PROGRAM, "actor", "--join", meeting.address, f"actor.name={name}"]
        files: list[int] = []
        for option, key in (("--key", meeting.key), ("--learner-key", meeting.learner_key)):
            if key is not None:
                files.append(_in_memory(key))
                command += [option, f"/proc/self/fd/{files[-1]}"]
        self._is_leaving = False
        # Ray kills its own processes when a node is drained; the actor's goes with them.
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        self._process = subprocess.Popen(command, env=environment, process_group=0, pass_fds=files)
        for file in files:
            os.close(file)
        self._watcher = threading.Thread(target=self._watch, name="actor-end", daemon=True)
        self._watcher.start()

    def state(self) -> Literal["working", "leaving"]:
        """Return what the actor was asked to do."""
        return "leaving" if self._is_leaving else "working"

    def leave(self) -> None:
        """Send SIGTERM; a second one would hurry the actor."""
        if not self._is_leaving:
            self._is_leaving = True
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End this object, and its process of Ray. Ray allows that inside of a call only."""
        import ray  # pyright: ignore[reportMissingImports]

        ray.actor.exit_actor()

    def _watch(self) -> None:
        """Ask for the end of this object. Waits for: the actor's process. Unblocked by: its end."""
        import ray  # pyright: ignore[reportMissingImports]

        status = self._process.wait()
        print(f"the actor has ended with status {status}", flush=True)
        ray.get_runtime_context().current_actor.end.remote()


def _in_memory(text: str) -> int:
    """Return the descriptor of a file with this text that nobody else can open, and that is gone when its users are."""
    descriptor = os.memfd_create("key")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, text.encode())
    return descriptor
