"""Chaos: plans, every fault on real processes, files and sockets, and a whole round on real services."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.processes import process_table as processes
from offbeat.common.records.rows import ActorRow, EventRow, Row, StepRow
from offbeat.common.records.run_folder import LOCK_FILE, LOG, LockOwner
from offbeat.common.records.writer import MetricsWriter
from offbeat.deploy.local.launcher import free_port
from offbeat.lab.audit import Check
from tests.chaos import faults
from tests.chaos.chaos import ChaosReport, RoundReport, print_chaos
from tests.chaos.faults import Attempt, Committed, Scene, commit
from tests.chaos.machine import Clock, Disk, open_disk
from tests.chaos.network import Proxy
from tests.chaos.round import Happened, Watch
from tests.chaos.schedule import FILLING, KINDS, OF_ENVIRONMENTS, OF_REWARDS, Fault, Kind, Target, plan, round_seed
from tests.deploy.services import SERVICES_S, Services
from tests.process_ends import kill_and_wait

pytestmark = pytest.mark.slow

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs root")


@given(seed=st.integers(0, 2**32), num_steps=st.integers(20, 1000))
def test_plan_holds_each_kind_once_in_the_order_of_its_steps_and_is_a_function_of_the_seed(seed: int, num_steps: int) -> None:
    for has_environment in (False, True):
        kinds = [fault.kind for fault in plan(seed, num_steps=num_steps, dead_after_s=5.0, has_environment=has_environment)]
        assert sorted(kinds) == sorted(set(KINDS) - set(OF_REWARDS if has_environment else OF_ENVIRONMENTS))
    faults = plan(seed, num_steps=num_steps, dead_after_s=5.0)
    steps = [fault.at_step for fault in faults]
    assert steps == sorted(steps)
    assert steps[0] > 0
    assert steps[-1] <= 0.9 * num_steps
    assert plan(seed, num_steps=num_steps, dead_after_s=5.0) == faults
    kinds = [fault.kind for fault in faults]
    assert all(kinds.index(kind) <= len(KINDS) // 2 for kind in FILLING), "a full disk at the end leaves no model"


def test_rounds_differ_and_stops_come_shorter_and_longer_than_a_peer_may_be_silent() -> None:
    plans = [plan(round_seed(0, index), num_steps=100, dead_after_s=5.0) for index in range(30)]
    assert len({tuple(fault.kind for fault in faults) for faults in plans}) == 30
    for kind in ("stop learner", "stop actor", "partition"):
        durations = [fault.duration_s for faults in plans for fault in faults if fault.kind == kind]
        assert 5 <= sum(duration > 5.0 for duration in durations) <= 25
    targets = {(fault.kind, fault.target) for faults in plans for fault in faults}
    assert {("kill actor", "local actor"), ("kill actor", "remote actor"), ("partition", "remote actor")} <= targets
    assert ("partition", "learner") not in targets


class Sleepers:
    """Processes that stand for the services."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen] = {}
        for target in ("learner", "local actor", "remote actor", "launcher"):
            child = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
            self.processes[target] = subprocess.Popen([sys.executable, "-c", child], process_group=0)
        self.states: list[str] = []
        """The learner's states, seen during each pause."""
        self.attempt = Attempt(2, "error: run.dir: another learner; data.train_data: another order")
        """The end of every learner that is tried."""
        self.tried: list[tuple[str, ...]] = []
        self.found: list[Target] = []

    def find(self, target: Target) -> int:
        self.found.append(target)
        return self.processes[target].pid

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.05))
        self.states.append(Path(f"/proc/{self.find('learner')}/stat").read_text().rpartition(")")[2].split()[0])

    def try_learner(self, *settings: str) -> Attempt:
        self.tried.append(settings)
        return self.attempt

    def close(self) -> None:
        for process in self.processes.values():
            # The whole group: the child of one that a fault has killed is nobody's descendant any more.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    sleepers, network = Sleepers(), Proxy()
    yield Scene(
        sleepers, network, Clock(tmp_path), None, None, tmp_path / "run", tmp_path / "train.jsonl", free_port("127.0.0.1")
    )
    sleepers.close()
    network.close()


def fault(kind: Kind, target: Target = "learner", duration_s: float = 0.2) -> Fault:
    return Fault(kind, target, at_step=1, delay_s=0.0, duration_s=duration_s, seed=1)


def detail_of(committed: Committed) -> str:
    assert committed.detail is not None
    return committed.detail


def test_killed_service_is_dead_when_the_fault_is_over(scene: Scene) -> None:
    assert commit(fault("kill actor", "remote actor"), scene).detail == "killed the remote actor"
    assert processes.has_ended(scene.victims.find("remote actor"))
    assert not processes.has_ended(scene.victims.find("learner"))


def test_learner_is_killed_while_its_checkpoint_is_half_written(scene: Scene) -> None:
    partial = scene.run / "checkpoints" / "step-00000010.partial"
    threading.Timer(0.3, lambda: partial.mkdir(parents=True)).start()
    assert "step-00000010.partial" in detail_of(commit(fault("kill learner in checkpoint"), scene))
    assert processes.has_ended(scene.victims.find("learner"))


def test_child_of_an_actor_is_awaited_and_killed_and_the_actor_is_not(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = scene.victims.find("local actor")
    assert detail_of(commit(fault("kill actor's child", "local actor"), scene)).startswith("local actor: killed")
    assert not processes.has_ended(actor)
    assert processes.children(actor) == []
    monkeypatch.setattr(faults, "WAIT_S", 0.1)
    assert commit(fault("kill actor's child", "local actor"), scene).detail is None


def test_semaphores_of_an_actor_whose_resource_tracker_is_killed_are_known(scene: Scene) -> None:
    assert isinstance(scene.victims, Sleepers)
    holder = "import multiprocessing as m, time; lock = m.get_context('spawn').Lock(); print(flush=True); time.sleep(60)"
    actor = subprocess.Popen([sys.executable, "-c", holder], process_group=0, stdout=subprocess.PIPE)
    scene.victims.processes["first"] = scene.victims.processes["local actor"]
    scene.victims.processes["local actor"] = actor
    assert actor.stdout is not None and actor.stdout.read(1)
    committed = commit(fault("kill actor's child", "local actor"), scene)
    assert committed.detail == "local actor: killed its resource tracker"
    kill_and_wait(actor.pid)
    (orphan,) = committed.orphans
    assert orphan.exists(), "nobody else deletes it"
    orphan.unlink()


@pytest.mark.parametrize("leaves", [True, False], ids=["an actor that leaves", "an actor that does not"])
def test_preempted_actor_is_asked_to_leave_then_killed_and_comes_back(
    leaves: bool, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(scene.victims, Sleepers)
    actor = scene.victims.processes["remote actor"]
    if not leaves:
        monkeypatch.setattr(faults, "NOTICE_S", 0.2)
        scene.victims.processes["preempted"] = actor
        busy = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
        actor = subprocess.Popen([sys.executable, "-c", busy], process_group=0, stdout=subprocess.PIPE)
        assert actor.stdout is not None and actor.stdout.read(1)
        scene.victims.processes["remote actor"] = actor
    said = "left in time" if leaves else "had to be killed"
    assert detail_of(commit(fault("preempt actor", "remote actor"), scene)) == f"preempted the remote actor, which {said}"
    assert actor.wait() == -(signal.SIGTERM if leaves else signal.SIGKILL)
    assert [target for target in scene.victims.found if target != "learner"] == 2 * ["remote actor"], "it comes back"


def test_stopped_service_stands_still_and_goes_on(scene: Scene) -> None:
    assert isinstance(scene.victims, Sleepers)
    commit(fault("stop learner"), scene)
    assert scene.victims.states == ["T"]
    scene.victims.pause(0.05)
    assert scene.victims.states[-1] in "SR"


@needs_root
def test_disk_fills_up_while_a_checkpoint_is_written(tmp_path: Path, scene: Scene) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    disk = Disk(folder, 1 << 20)
    try:
        partial = scene.run / "checkpoints" / "step-00000010.partial"
        threading.Timer(0.1, lambda: partial.mkdir(parents=True)).start()
        detail = detail_of(commit(fault("fill disk in checkpoint"), scene._replace(disk=disk)))
        assert detail.startswith("while the learner wrote step-00000010.partial, left no room")
        (folder / "file").write_bytes(b"x" * 1000)
    finally:
        disk.close()


@needs_root
def test_disk_fills_up_for_a_while_and_goes_away(tmp_path: Path, scene: Scene) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    disk = Disk(folder, 16 << 20)
    try:
        disk.fill(0)
        with pytest.raises(OSError, match="No space left"):
            (folder / "file").write_bytes(b"x" * (1 << 20))
        disk.empty()
        (folder / "file").write_bytes(b"x" * (1 << 20))
        assert "KB free" in detail_of(commit(fault("fill disk"), scene._replace(disk=disk)))
    finally:
        disk.close()
    assert str(folder) not in Path("/proc/mounts").read_text()


def test_disk_that_cannot_be_made_is_a_fault_that_cannot_be_committed(tmp_path: Path, scene: Scene) -> None:
    assert open_disk(tmp_path / "there is no such folder", 1 << 20) is None
    assert commit(fault("fill disk"), scene).detail is None


def test_files_of_a_learner_that_serves_do_not_grow_for_a_while(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = scene.victims.find("learner")
    segment = scene.run / LOG / "00000001.log"
    segment.parent.mkdir(parents=True)
    segment.touch()

    def limit() -> int:
        return resource.prlimit(learner, resource.RLIMIT_FSIZE)[0]

    limits = [limit()]

    def lock() -> None:
        (scene.run / LOCK_FILE).write_bytes(msgspec.json.encode(LockOwner(learner, "here")))

    def serve() -> None:
        later_ns = (scene.run / LOCK_FILE).stat().st_mtime_ns + 1
        os.utime(segment, ns=(later_ns, later_ns))

    start = [lock, serve]

    def pause(seconds: float) -> None:
        limits.append(limit())
        if start:
            start.pop(0)()

    monkeypatch.setattr(scene.victims, "pause", pause)
    assert detail_of(commit(fault("limit file size"), scene)) == "let no file of the learner grow for 0.2 s"
    assert [*limits, limit()] == [limits[0], limits[0], limits[0], 0, limits[0]]
    assert limits[0] != 0


def test_processes_are_found_by_the_mark_that_they_inherit() -> None:
    script = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "MARK": "of this test"})
    try:
        deadline = time.monotonic() + 10
        while len(processes.marked("MARK", "of this test")) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        both = processes.marked("MARK", "of this test")
        assert sorted(both) == sorted([process.pid, *processes.descendants(process.pid)])
        assert len(both) == 2
        assert processes.marked("MARK", "of") == []
        for pid in both:
            kill_and_wait(pid)
        # The process is dead, but not yet collected by this one.
        assert processes.marked("MARK", "of this test") == []
    finally:
        process.kill()
        process.wait()


def actor_row(name: str, num_groups_sent: int) -> ActorRow:
    return ActorRow(
        actor=name,
        policy_version=0,
        num_generated_tokens=0,
        num_groups_sent=num_groups_sent,
        num_running_completions=0,
        seconds={},
    )


def test_recovery_is_read_from_the_next_step_and_from_the_next_group_of_that_actor(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "metrics.jsonl")
    watch.look()
    with MetricsWriter(tmp_path) as metrics:

        def seen(row: Row) -> float:
            metrics.write(row)
            watch.look()
            return time.monotonic()

        seen(StepRow(policy_version=7, metrics={}))
        seen(actor_row("a", 5))
        struck = seen(actor_row("b", 9))
        assert watch.next_step_s(struck) is None
        # Neither groups that the actor sent before nor groups of another actor count as recovery.
        seen(actor_row("a", 5))
        seen(actor_row("b", 12))
        assert watch.next_group_s("a", struck) is None
        # A new process of that name.
        before = seen(actor_row("a", 0))
        after = seen(actor_row("a", 2))
        recovery_s = watch.next_group_s("a", struck)
        assert recovery_s is not None
        assert before - struck <= recovery_s <= after - struck
        # Trained again from a checkpoint.
        seen(StepRow(policy_version=5, metrics={}))
        assert watch.next_step_s(struck) is not None
        assert watch.newest_step == 7
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","policy_ver')
        file.flush()
        watch.look()
        file.write(b'sion":8}\n')
    watch.look()
    assert watch.newest_step == 8


def test_watch_knows_the_actors_that_are_connected(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "metrics.jsonl")
    with MetricsWriter(tmp_path) as metrics:

        def members_after(event: str, actor: str | None = None) -> set[str]:
            metrics.write(EventRow(event=event, detail="", actor=actor))
            watch.look()
            return watch.members

        assert members_after("actor_joined", "a") == {"a"}
        assert members_after("actor_joined", "b") == {"a", "b"}
        assert members_after("actor_excluded", "b") == {"a", "b"}
        assert members_after("actor_left", "a") == {"b"}
        assert members_after("actor_lost", "b") == set()
        members_after("actor_joined", "c")
        assert members_after("run_started") == set(), "a new learner knows nobody"


def report(*checks: Check, left_over: list[str] | None = None) -> ChaosReport:
    happened = Happened(fault("kill learner"), at_s=3.0, detail="killed the learner", recovery_s=4.5)
    return ChaosReport(0, "proxy", False, [RoundReport(1, 60.0, [happened], list(checks))], left_over or [])


def test_table_shows_recovery_violations_and_what_was_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    print_chaos(report(Check("every lease ends once", [], "9 leases"), Check("no process is left", ["process [7]"], "none")))
    text = capsys.readouterr().out
    row = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert "4.5 s" in row["kill learner"]
    assert "SKIPPED" in row["fill disk"]
    assert "OK" in row["every lease ends once"]
    assert "VIOLATION" in row["no process is left"]
    assert "round 0: process [7]" in text


def test_any_violation_makes_the_report_a_bad_one() -> None:
    good, bad = Check("claim", [], ""), Check("claim", ["violation"], "")
    assert report(good).is_good
    assert not report(good, bad).is_good
    assert not report(good, left_over=["a mount"]).is_good
    assert not ChaosReport(0, "proxy", False, [], []).is_good


@pytest.mark.chaos
@pytest.mark.timeout(SERVICES_S)
def test_round_of_all_faults_on_real_services_has_no_violation(services: Services, tmp_path: Path) -> None:
    """The round has each kind of fault once; fewer steps and shorter silences than the command's own save a minute."""
    quick = ("train.num_steps=60", "hub.dead_after_s=3.0")
    chaos = services.start_chaos(*quick, "--seed", "193", "--minutes", "0")
    assert services.wait(chaos, "chaos") == 0, services.output("chaos")
    found = msgspec.json.decode(next(tmp_path.glob("runs/*/chaos.json")).read_bytes(), type=ChaosReport)
    committed = {happened.fault.kind for happened in found.rounds[0].happened if happened.detail}
    assert committed | {"fill disk", "fill disk in checkpoint"} == set(KINDS) - set(OF_ENVIRONMENTS), "only a disk needs root"


@pytest.mark.engine
@pytest.mark.timeout(SERVICES_S)
def test_interrupted_chaos_takes_everything_down(services: Services, tmp_path: Path) -> None:
    chaos = services.start_chaos("--minutes", "9")
    services.wait_for(lambda: is_learner_there(chaos.pid), "a learner")
    started = processes.descendants(chaos.pid)
    (work,) = {Path(word).parents[1] for pid in started for word in processes.arguments(pid) if word.endswith("/run.toml")}
    chaos.send_signal(signal.SIGINT)
    assert services.wait(chaos, "chaos") == 130, services.output("chaos")
    assert all(processes.has_ended(pid) for pid in started)
    assert not work.exists()
    assert str(work) not in Path("/proc/mounts").read_text()
    assert f"ob{chaos.pid}a" not in Path("/proc/net/dev").read_text()
    assert "OK" in next(line for line in services.output("chaos").splitlines() if "nothing is left" in line)


def is_learner_there(pid: int) -> bool:
    return any("learner" in processes.arguments(child) for child in processes.descendants(pid))
