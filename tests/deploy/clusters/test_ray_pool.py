"""Claims about what a pool of actors asks of Ray, and what it takes the answers for; Ray is a stand-in.

The real one has its own claims (`test_ray_pool_for_real`), where it is installed.
"""

import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.loading import load
from offbeat.deploy.clusters import ray_pool as ray_host
from offbeat.deploy.clusters.pool import PoolError, needed
from offbeat.deploy.clusters.ray_pool import Host, LearnerAccess, RayPool, num_gpus, open_ray_pool

MEETING = LearnerAccess("tcp://learner:5700", None, None)


class RayError(Exception):
    pass


class GetTimeoutError(RayError):
    pass


class ActorDiedError(RayError):
    pass


class Placed:
    """An object of Ray: `answers` is what it says of its state, an error, or None while it waits for a node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answers: str | RayError | None = None
        self.num_asked = 0
        self.num_asked_to_leave = 0
        self.state = SimpleNamespace(remote=self._ask)
        self.leave = SimpleNamespace(remote=self._leave)

    def _ask(self) -> "Placed":
        self.num_asked += 1
        return self

    def _leave(self) -> None:
        self.num_asked_to_leave += 1


class Cluster:
    """A stand-in for the package `ray` and a cluster."""

    exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError, ActorDiedError=ActorDiedError)

    def __init__(self) -> None:
        self.objects: dict[str, Placed] = {}
        self.options: dict[str, Any] = {}
        self.started: list[tuple[str, LearnerAccess]] = []
        self.killed: list[str] = []
        self.is_down = False
        self.connected: dict[str, Any] = {}
        self.num_nodes = 1
        self.util = SimpleNamespace(list_named_actors=self._list)

    def remote(self, **options: Any) -> Any:
        self.options = options

        def make(name: str, meeting: LearnerAccess) -> None:
            self.started.append((name, meeting))
            self.objects[name] = Placed(name)

        return lambda holder: SimpleNamespace(options=lambda name: SimpleNamespace(remote=make))

    def _list(self) -> list[str]:
        if self.is_down:
            raise ConnectionError("the GCS does not answer")
        return list(self.objects)

    def get_actor(self, name: str) -> Placed:
        return self.objects[name]

    def wait(self, questions: list[Placed], num_returns: int, timeout: float) -> None:
        assert num_returns == len(questions)

    def get(self, asked: Placed, timeout: float) -> str:
        if asked.answers is None:
            raise GetTimeoutError
        if isinstance(asked.answers, RayError):
            raise asked.answers
        return asked.answers

    def kill(self, placed: Placed) -> None:
        self.killed.append(placed.name)
        del self.objects[placed.name]

    def init(self, **options: Any) -> None:
        if self.is_down:
            raise ConnectionError("could not find any running Ray instance")
        self.connected = options
        signal.signal(signal.SIGTERM, lambda *_: None)

    def nodes(self) -> list[object]:
        return [object()] * self.num_nodes

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0, "GPU": 4.0}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setitem(sys.modules, "ray", made)  # pyright: ignore[reportArgumentType]
    return made


def states(pool: RayPool) -> list[str]:
    return [actor.state for actor in pool.running()]


def test_actors_outlive_the_pool_have_one_cpu_their_gpus_and_names_by_age(cluster: Cluster) -> None:
    pool = RayPool(MEETING, 2)
    pool.start(12)
    assert cluster.options == {"num_cpus": 1, "num_gpus": 2, "max_restarts": 0, "lifetime": "detached"}
    names = [name for name, _ in cluster.started]
    assert {meeting for _, meeting in cluster.started} == {MEETING}
    assert len(set(names)) == 12
    assert all(name.startswith("actor-") for name in names), "the pattern of the fleet's key"
    assert [actor.name for actor in pool.running()] == names
    assert [actor.name for actor in RayPool(MEETING, 2).running()] == names


def test_state_is_what_an_actor_answers_and_one_without_a_node_is_asked_once(cluster: Cluster) -> None:
    pool = RayPool(MEETING, 0)
    pool.start(4)
    waiting, working, leaving, dead = cluster.objects.values()
    working.answers, leaving.answers, dead.answers = "working", "leaving", ActorDiedError()
    assert states(pool) == ["starting", "working", "leaving"]
    assert states(pool) == ["starting", "working", "leaving"]
    assert (waiting.num_asked, working.num_asked) == (1, 2)
    waiting.answers = "working"
    assert states(pool) == ["working", "working", "leaving"]


def test_dead_actor_is_replaced(cluster: Cluster) -> None:
    pool = RayPool(MEETING, 0)
    pool.start(2)
    alive, dead = cluster.objects.values()
    alive.answers, dead.answers = "working", ActorDiedError()
    assert needed(pool.running(), 2).start == 1


def test_busy_actor_that_is_slow_to_answer_is_not_killed_when_it_is_released(cluster: Cluster) -> None:
    pool = RayPool(MEETING, 0)
    pool.start(1)
    ((name, busy),) = cluster.objects.items()
    busy.answers = "working"
    pool.running()
    busy.answers = None
    assert states(pool) == ["working"]
    pool.release([name])
    assert (busy.num_asked_to_leave, cluster.killed) == (1, [])


def test_release_asks_those_at_work_and_takes_back_the_wish_for_others(cluster: Cluster) -> None:
    pool = RayPool(MEETING, 0)
    pool.start(4)
    (first, working), (second, _), (third, leaving), _ = cluster.objects.items()
    working.answers, leaving.answers = "working", "leaving"
    pool.release([first, second, third, "actor-unknown"])
    assert cluster.killed == [second]
    assert [placed.num_asked_to_leave for placed in (working, leaving)] == [1, 0]


def test_cluster_that_does_not_answer_is_a_pool_error(cluster: Cluster) -> None:
    pool = RayPool(MEETING, 0)
    cluster.is_down = True
    with pytest.raises(PoolError, match="the GCS does not answer"):
        pool.running()


@pytest.mark.parametrize(
    ("options", "resources", "number"),
    [({}, {"GPU": 8.0}, 1), ({"tensor_parallel_size": 4}, {"GPU": 8.0}, 4), ({"tensor_parallel_size": 4}, {"CPU": 8.0}, 0)],
)
def test_each_actor_has_a_gpu_for_each_part_of_the_model(
    options: dict[str, Any], resources: dict[str, float], number: int
) -> None:
    config = load(None, [f"actor.engine_options.{name}={value}" for name, value in options.items()])
    assert num_gpus(config, resources) == number


def test_pool_connects_in_the_run_s_namespace_and_hands_out_the_text_of_the_keys(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "actor.key").write_text("secret")
    (tmp_path / "learner.pub").write_text("public")
    settings = [
        f"run.dir={tmp_path}/run",
        "hub.address=tcp://learner:5700",
        f"hub.key={tmp_path}/{{name}}.key",
        f"hub.learner_key={tmp_path}/learner.pub",
    ]
    cluster.num_nodes = 3
    handler = signal.getsignal(signal.SIGTERM)
    pool = open_ray_pool(load(None, settings), "head:6379")
    assert signal.getsignal(signal.SIGTERM) is handler, "not Ray's: `offbeat reconcile` ends in order"
    assert (cluster.connected["address"], cluster.connected["namespace"]) == ("head:6379", f"offbeat:{tmp_path}/run")
    assert cluster.options["num_gpus"] == 1
    pool.start(1)
    assert cluster.started[0][1] == LearnerAccess("tcp://learner:5700", "secret", "public")
    (tmp_path / "actor.key").unlink()
    with pytest.raises(SettingError, match=r"hub\.key.*there is no .*actor\.key.*offbeat keygen"):
        open_ray_pool(load(None, settings), "")


def test_what_the_user_has_to_correct_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.num_nodes = 2
    with pytest.raises(SettingError, match=r"hub\.address = .*127\.0\.0\.1.*other nodes of the cluster cannot reach it"):
        open_ray_pool(load(None, []), "")
    assert cluster.connected["address"] == "auto"
    cluster.is_down = True
    with pytest.raises(SettingError, match=r'--on = "ray:head:6379": no cluster answers \(could not find.*--on ray:HOST:6379'):
        open_ray_pool(load(None, []), "head:6379")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r'--on = "ray": ray is not installed\. Install it: pip install "offbeat\[ray\]"'):
        open_ray_pool(load(None, []), "")


def test_holder_ends_with_its_actor_which_gets_one_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended: list[bool] = []
    own = SimpleNamespace(end=SimpleNamespace(remote=lambda: ended.append(True)))
    ray = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(current_actor=own))
    monkeypatch.setitem(sys.modules, "ray", ray)  # pyright: ignore[reportArgumentType]
    script = "trap 'exit 3' TERM; cat $6 $8 >text; stat -Lc %a $6 >>text; touch up; while :; do sleep 0.05; done"
    monkeypatch.setattr(ray_host, "PROGRAM", ("sh", "-c", script, "offbeat"))
    monkeypatch.chdir(tmp_path)
    host = Host("actor-1", LearnerAccess("tcp://learner:5700", "secret, ", "public "))
    signals: list[int] = []
    send = host._process.send_signal
    monkeypatch.setattr(host._process, "send_signal", lambda number: (signals.append(number), send(number)))
    assert host.state() == "working"
    while not Path("up").exists():
        assert host._process.poll() is None
        time.sleep(0.01)
    assert Path("text").read_text() == "secret, public 600\n"
    host.leave()
    host.leave()
    assert host.state() == "leaving"
    assert signals == [signal.SIGTERM]
    assert host._process.wait(20) == 3
    host._watcher.join(20)
    assert ended == [True]
