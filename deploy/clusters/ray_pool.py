"""A pool of actors on Ray: objects of Ray with names, each of which holds an actor's process on a node and ends with it.

The cluster is the pool's only memory: the objects are detached from the process that made them, and a pool that is opened again
finds them by the run's namespace.
"""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from offbeat.common.errors import SettingError
from offbeat.common.processes.shutdown import PARENT_VARIABLE
from offbeat.common.settings.config import Config
from offbeat.deploy.clusters.pool import Instance, PoolError
from offbeat.deploy.clusters.services import FLEET, find_fleet_key
from offbeat.deploy.local.memory import tensor_parallel_size
from offbeat.deploy.local.starts import PROGRAM
from offbeat.protocols.addresses import is_loopback
from offbeat.protocols.text import plain

ANSWER_S = 5.0
"""Longest wait for the objects of Ray to tell their states; those that wait for a node do not answer."""


class LearnerAccess(NamedTuple):
    """The learner as an actor on another machine gets to know it."""

    address: str
    """The learner's `tcp://HOST:PORT`, or the file that tells it."""
    key: str | None
    """The actors' secret key; None where the run has no keys."""
    learner_key: str | None
    """The learner's public key."""


class Host:
    """The holder of one actor's process: Ray gives it a node with room, and takes the room back when the process has ended."""

    def __init__(self, name: str, meeting: LearnerAccess) -> None:
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


class RayPool:
    """The actors of one run on Ray."""

    def __init__(self, meeting: LearnerAccess, num_gpus: int, holder: type[Host] = Host) -> None:
        """Use the cluster and the namespace that this process is connected to. Each actor gets `num_gpus`, and one CPU."""
        import ray  # pyright: ignore[reportMissingImports]

        self._ray: Any = ray
        self._meeting = meeting
        self._holder = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=0, lifetime="detached")(holder)
        self._asked: dict[str, Any] = {}
        """The question for its state that each actor has not answered yet: one that waits for a node shall not collect them."""
        self._placed: set[str] = set()
        """Actors that have answered once: one that is too busy to answer again does not wait for a node."""

    def running(self) -> list[Instance]:
        """Return the actors that are not over, oldest first."""
        with _told():
            names = sorted(self._ray.util.list_named_actors())
            for name in names:
                if name not in self._asked:
                    self._asked[name] = self._ray.get_actor(name).state.remote()
            self._asked = {name: asked for name, asked in self._asked.items() if name in names}
            questions = [self._asked[name] for name in names]
            if questions:
                self._ray.wait(questions, num_returns=len(questions), timeout=ANSWER_S)
            found = [self._answer(name) for name in names]
        return [instance for instance in found if instance is not None]

    def start(self, count: int) -> None:
        """Make objects of Ray; those for which there is no room wait, and let the cluster's autoscaler know."""
        now_ms = int(time.time() * 1000)
        with _told():
            for number in range(count):
                # In order of age, also behind those of a pool before.
                name = f"{FLEET}-{now_ms:011x}-{number:03d}"
                self._holder.options(name=name).remote(name, self._meeting)

    def release(self, names: Sequence[str]) -> None:
        """Ask actors to leave, and take back the wish for those that wait for a node."""
        there = {instance.name: instance.state for instance in self.running()}
        with _told():
            for name in names:
                if there.get(name) == "working":
                    self._ray.get_actor(name).leave.remote()
                elif there.get(name) == "starting":
                    self._ray.kill(self._ray.get_actor(name))

    def _answer(self, name: str) -> Instance | None:
        """Return the actor by what it answered; None for one that is dead."""
        errors = self._ray.exceptions
        try:
            state = self._ray.get(self._asked[name], timeout=0)
        except errors.GetTimeoutError:
            return Instance(name, "working" if name in self._placed else "starting")
        except errors.ActorDiedError:
            return None
        del self._asked[name]
        self._placed.add(name)
        return Instance(name, state)


def open_ray_pool(config: Config, place: str) -> RayPool:
    """Connect to the cluster at `place`, or to the one that this machine belongs to, and return the run's pool there."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise SettingError("--on", "ray", "ray is not installed", 'Install it: pip install "offbeat[ray]"') from error
    namespace = f"offbeat:{Path(config.run.dir).resolve()}"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=place or "auto", namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        cure = (
            "Start this on a node of the cluster, or name its head: --on ray:HOST:6379. Where the cluster asks for a token, "
            "set RAY_AUTH_MODE=token in the environment."
        )
        raise SettingError("--on", f"ray:{place}", f"no cluster answers ({plain(str(error))})", cure) from error
    # Ray has put its own in their place.
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if is_loopback(config.hub.address) and len(ray.nodes()) > 1:
        cure = "Set hub.address to tcp://HOST:PORT of the learner's machine, with keys."
        raise SettingError("hub.address", config.hub.address, "other nodes of the cluster cannot reach it", cure)
    return RayPool(_meeting(config), num_gpus(config, ray.cluster_resources()))


def num_gpus(config: Config, resources: dict[str, float]) -> int:
    """Return the GPUs of each actor: one for each part of the model, none on a cluster without GPUs."""
    return tensor_parallel_size(config) if resources.get("GPU") else 0


def _meeting(config: Config) -> LearnerAccess:
    """Return the learner's address and the text of the keys, which nodes without a shared file system could not read."""
    hub = config.hub
    if not hub.key:
        return LearnerAccess(hub.address, None, None)
    return LearnerAccess(hub.address, find_fleet_key(hub.key).read_text(), Path(hub.learner_key).read_text())


@contextmanager
def _told() -> Iterator[None]:
    """Raise `PoolError` for whatever the cluster could not do."""
    import ray  # pyright: ignore[reportMissingImports]

    try:
        yield
    # ValueError: an actor has ended between two questions.
    except (ray.exceptions.RayError, ConnectionError, ValueError) as error:
        raise PoolError(f"Ray does not do what it was asked to ({type(error).__name__}: {plain(str(error))})") from error
