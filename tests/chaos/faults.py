"""The faults of a chaos round, committed on real processes, files and connections."""

import contextlib
import math
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, assert_never

import msgspec

from offbeat.common.processes import process_table as processes
from offbeat.common.processes.shutdown import USER_ERROR_STATUS
from offbeat.common.records.run_folder import CHECKPOINTS, CONFIG_FILE, LOCK_FILE, LOG, read_owner
from offbeat.learner.leases.events import Expired, LeaseEvent, Tuned
from offbeat.learner.leases.log_reading import HEADER_BYTES, Position, SegmentHeader, encode_header, encode_record, read_log
from offbeat.learner.restart.resume import ServiceState
from offbeat.learner.training import checkpoints
from tests.chaos.changes import doubt_learner, scale_up_and_down
from tests.chaos.judge import Judge
from tests.chaos.machine import Clock, Disk
from tests.chaos.network import Network
from tests.chaos.schedule import Fault, Target
from tests.chaos.strangers import crowd, speak
from tests.chaos.tools import Struck, Tools
from tests.process_ends import is_mapped, kill_and_wait

T = TypeVar("T")

MAX_FILES = 1024
"""Limit on the open files of every service of `offbeat train`: many systems have no higher one by default."""
NUM_STRANGERS = 1500
"""Silent connections at a time: more than a service may have files."""
STRANGERS_S = 1.0
"""Seconds in which a learner ends that strangers have hit."""
WAIT_S = 60.0
"""Longest time to wait until a service is where a fault hits it, in seconds."""
NOTICE_S = 5.0
"""Seconds between SIGTERM and SIGKILL for an actor whose machine is taken away."""
DAY_S = 86_400.0
DAMAGES_AT_THE_END = ("garbage", "half a record", "repeated records", "copied segment", "flipped bit", "cut")
DAMAGES_IN_THE_MIDDLE = ("flipped bit in the middle",)
NEAR_RECORDS = 60
"""The middle is damaged within this many records of the end: a restart from the newest checkpoint reads no older ones."""
NEARLY_FULL_BYTES = 32 << 20
"""Room on the disk that is enough for the log and for a checkpoint."""
MORE_DATA = "more.jsonl"
"""File beside the training data with the rows that a fault adds to it."""


class Victims(Protocol):
    """The services of a round, for the faults to act on."""

    def find(self, target: Target) -> int:
        """Return the process id of a service, waiting until it runs; an actor that left is started again."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait this many seconds, and do meanwhile what keeps the round going."""
        ...

    def try_learner(self, *settings: str) -> "Attempt":
        """Start another learner with these settings on the run's folder, and wait for its end."""
        ...


class Attempt(NamedTuple):
    """The end of a learner that should be refused."""

    status: int
    said: str
    """Output of the learner."""


class Scene(NamedTuple):
    """The targets of faults."""

    victims: Victims
    network: Network
    clock: Clock
    disk: Disk | None
    judge: Judge | None
    """The judge that rewards ask; None where the run has a reward of its own."""
    run: Path
    """The run's folder."""
    train_data: Path
    """The run's training data."""
    hub_port: int
    """Port of the hub at `network.learner_host`."""
    tools: Tools | None = None
    """The tools of the environment; None where the run has none."""


class Committed(NamedTuple):
    """The outcome of a fault."""

    detail: str | None
    """The fault in words; None when it could not be committed."""
    lost: tuple[LeaseEvent, ...] = ()
    """Events that the fault destroyed in the rollout log."""
    violations: tuple[str, ...] = ()
    """Reactions of the services that are violations."""
    has_hit: bool | None = None
    """True if the fault has had its effect; None where the fault itself does not tell (`tests.chaos.effects`)."""
    orphans: tuple[Path, ...] = ()
    """Semaphores whose resource tracker was killed. If their process is killed too, nobody in the run can delete them."""


def commit(fault: Fault, scene: Scene) -> Committed:
    """Commit a fault, and return when it is over."""
    generator = random.Random(fault.seed)
    victims, network, pause = scene.victims, scene.network, scene.victims.pause
    match fault.kind:
        case "kill learner" | "kill actor":
            kill_and_wait(victims.find(fault.target))
            return Committed(f"killed the {fault.target}")
        case "kill learner in checkpoint":
            return _kill_in_checkpoint(scene)
        case "preempt actor":
            return _preempt(victims, fault)
        case "kill actor's child":
            return _kill_child(victims, fault.target, generator)
        case "stop learner" | "stop actor":
            return _stop(victims, fault)
        case "cut connection":
            network.cut()
            return Committed("cut the connections")
        case "partition":
            network.part()
            pause(fault.duration_s)
            network.join()
            return Committed(f"nothing got through for {fault.duration_s:.1f} s")
        case "packet loss":
            network.lose_packets(fault.duration_s, pause, generator)
            return Committed(f"lost packets for {fault.duration_s:.1f} s")
        case "corrupt log" | "corrupt log's middle":
            kill_and_wait(victims.find("learner"))
            damages = DAMAGES_AT_THE_END if fault.kind == "corrupt log" else DAMAGES_IN_THE_MIDDLE
            return corrupt_log(scene.run / LOG, generator.choice(damages), generator)
        case "damage checkpoint":
            _wait(victims, lambda: checkpoints.newest(scene.run / CHECKPOINTS))
            kill_and_wait(victims.find("learner"))
            return damage_checkpoint(scene.run / CHECKPOINTS, generator)
        case "fill disk":
            return _fill_disk(scene, fault, generator)
        case "fill disk in checkpoint":
            return _fill_disk_in_checkpoint(scene, fault)
        case "limit file size":
            return _limit_file_size(scene, fault)
        case "doubt learner" | "scale":
            return _change_settings(scene, fault)
        case "jump clock":
            return _jump_clock(scene, fault, generator)
        case "second learner":
            return _start_second_learner(scene)
        case "resume with changes":
            return _resume_with_changes(scene)
        case "another run's log":
            return _resume_with_another_log(scene)
        case "append data":
            return _append_data(scene)
        case "judge down":
            return _take_judge_down(scene, fault)
        case "descriptors gone":
            return _take_descriptors(scene, fault)
        case "strangers speak":
            return _let_strangers_speak(scene)
        case "kill environment" | "wedge tool" | "leave daemon" | "tool down":
            struck = Struck(None) if scene.tools is None else _strike_tools(scene.tools, fault, pause)
            return Committed(struck.detail, violations=struck.violations, has_hit=struck.has_hit)
        case _:
            assert_never(fault.kind)


def _wait(victims: Victims, look: Callable[[], T], *, limit_s: float | None = None, look_s: float = 0.05) -> T:
    """Look until what is seen is true, for at most `WAIT_S` or `limit_s`, and return what was seen last."""
    deadline = time.monotonic() + (WAIT_S if limit_s is None else limit_s)
    while not (seen := look()) and time.monotonic() < deadline:
        victims.pause(look_s)
    return seen


def corrupt_log(log: Path, damage: str, generator: random.Random) -> Committed:
    """Damage the newest segment as a killed process or a bad disk would. No process may write the log meanwhile.

    `damage` is one of `DAMAGES_AT_THE_END` or `DAMAGES_IN_THE_MIDDLE`.
    """
    before = list(read_log(log))
    segment = max(log.glob("*.log"), default=None)
    whole = segment.read_bytes() if segment else b""
    content = bytearray(whole)
    if not before or segment is None or len(content) < HEADER_BYTES:
        return Committed(None)
    last = before[-1].position
    # A new segment may hold no record yet; then only garbage can be added to it.
    start = last.offset if segment.name == f"{last.segment:08d}.log" else len(content)
    damage = damage if start < len(content) else "garbage"
    if damage == "garbage":
        content += generator.randbytes(generator.randint(1, 300))
    elif damage == "repeated records":
        content += content[min(record.position.offset for record in before[-3:] if record.position.segment == last.segment) :]
    elif damage == "copied segment":
        (log / f"{last.segment + 1:08d}.log").write_bytes(content)
    elif damage == "half a record":
        content += content[start : start + (len(content) - start) // 2]
    elif damage == "flipped bit":
        content[generator.randrange(start, len(content))] ^= 1 << generator.randrange(8)
    elif damage == "cut":
        del content[generator.randrange(start, len(content)) :]
    else:
        near = min(record.position.offset for record in before[-NEAR_RECORDS:] if record.position.segment == last.segment)
        # Of a segment with one record there is no middle but the header.
        content[generator.randrange(near if start > near else 0, start)] ^= 1 << generator.randrange(8)
    segment.write_bytes(content)
    end = "" if "middle" in damage else " at the end"
    left = {record.position for record in read_log(log)}
    lost = [record.event for record in before if record.position not in left]
    if any(isinstance(event, Tuned) for event in lost):
        # Without it the settings of "doubt learner" would hold for good, and end the run as they should.
        segment.write_bytes(whole + generator.randbytes(100))
        return Committed(f"garbage at the end of {segment.name}, 0 records lost")
    return Committed(f"{damage}{end} of {segment.name}, {len(lost)} records lost", tuple(lost))


def damage_checkpoint(root: Path, generator: random.Random) -> Committed:
    """Flip a bit in the newest checkpoint, delete one of its files, or make it another run's, or of another version.

    No process may write checkpoints meanwhile.
    """
    folder = checkpoints.newest(root)
    if folder is None:
        return Committed(None)
    if generator.random() < 0.25:
        return _make_foreign(folder)
    if generator.random() < 0.25:
        renamed = folder.rename(checkpoints.checkpoint_folder(root, checkpoints.version_of(folder) + 1))
        return Committed(f"renamed {folder.name} to {renamed.name}")
    file = generator.choice(sorted(path for path in folder.iterdir() if path.stat().st_size))
    if generator.random() < 0.25:
        file.unlink()
        return Committed(f"deleted {file.name} of {folder.name}")
    content = bytearray(file.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    file.write_bytes(content)
    return Committed(f"flipped a bit in {file.name} of {folder.name}")


def _make_foreign(folder: Path) -> Committed:
    """Write a checkpoint again, as another run would have."""
    partial = checkpoints.partial_folder(folder)
    shutil.copytree(folder, partial)
    checkpoints.manifest(partial).unlink()
    state = msgspec.msgpack.decode(checkpoints.read_extra(folder), type=ServiceState)
    checkpoints.write_extra(partial, msgspec.msgpack.encode(msgspec.structs.replace(state, run_id="another")))
    checkpoints.publish(folder)
    return Committed(f"made {folder.name} another run's")


def _change_settings(scene: Scene, fault: Fault) -> Committed:
    change = doubt_learner if fault.kind == "doubt learner" else scale_up_and_down
    return Committed(change(scene.run, scene.victims.pause, fault.duration_s))


def _kill_in_checkpoint(scene: Scene) -> Committed:
    learner = scene.victims.find("learner")
    partial = _await_checkpoint(scene)
    kill_and_wait(learner)
    return Committed(f"killed the learner while it wrote {partial.name}" if partial else "killed the learner")


def _await_checkpoint(scene: Scene) -> Path | None:
    """Wait until the learner writes a checkpoint, and return its unfinished folder; None when it writes none."""
    partial = _wait(scene.victims, lambda: list((scene.run / CHECKPOINTS).glob("*.partial")), look_s=0.005)
    return partial[0] if partial else None


def _kill_child(victims: Victims, target: Target, generator: random.Random) -> Committed:
    # An actor that a fault before this one has killed may have just begun to start.
    children = _wait(victims, lambda: processes.descendants(victims.find(target)))
    if not children:
        return Committed(None)
    child = generator.choice(children)
    is_tracker = "resource_tracker" in " ".join(processes.arguments(child))
    family = [(actor := victims.find(target)), *processes.descendants(actor)] if is_tracker else []
    orphans = tuple(path for path in Path("/dev/shm").glob("sem.mp-*") if is_mapped(path, family))
    kill_and_wait(child)
    return Committed(f"{target}: killed its {'resource tracker' if is_tracker else 'worker'}", orphans=orphans)


def _preempt(victims: Victims, fault: Fault) -> Committed:
    """Take an actor's machine away with `NOTICE_S` of notice, and bring it back."""
    victim = victims.find(fault.target)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGTERM)
    has_left = _wait(victims, lambda: processes.has_ended(victim), limit_s=NOTICE_S)
    if not has_left:
        processes.kill_group(victim)
    victims.find(fault.target)
    return Committed(f"preempted the {fault.target}, which {'left in time' if has_left else 'had to be killed'}")


def _stop(victims: Victims, fault: Fault) -> Committed:
    victim = victims.find(fault.target)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGSTOP)
        victims.pause(fault.duration_s)
        os.kill(victim, signal.SIGCONT)
    return Committed(f"stopped the {fault.target} for {fault.duration_s:.1f} s")


def _fill_disk(scene: Scene, fault: Fault, generator: random.Random) -> Committed:
    if scene.disk is None:
        return Committed(None)
    leave_bytes = generator.choice([0, 1 << 16, 4 << 20])
    scene.disk.fill(leave_bytes)
    scene.victims.pause(fault.duration_s)
    scene.disk.empty()
    return Committed(f"left {leave_bytes >> 10} KB free for {fault.duration_s:.1f} s")


def _limit_file_size(scene: Scene, fault: Fault) -> Committed:
    """Let no file of the learner grow for a while, as under `ulimit -f`; then files may be as large as before."""
    victim = scene.victims.find("learner")
    # A learner that starts under such a limit ends with the cure, and is right: users raise the limit of the shell.
    if not _wait(scene.victims, lambda: _is_serving(scene.run, victim)):
        return Committed(None)
    with contextlib.suppress(ProcessLookupError):
        before = resource.prlimit(victim, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        scene.victims.pause(fault.duration_s)
        resource.prlimit(victim, resource.RLIMIT_FSIZE, before)
    return Committed(f"let no file of the learner grow for {fault.duration_s:.1f} s")


def _is_serving(run: Path, learner: int) -> bool:
    """Return whether the learner has locked the run's folder and then begun to serve, which its rollout log notes."""
    locked_at = _locked_at(run, learner)
    return any(segment.stat().st_mtime_ns > locked_at for segment in (run / LOG).glob("*.log"))


def _locked_at(run: Path, learner: int) -> float:
    """Return when the learner has locked the run's folder, in nanoseconds of its file system; infinity before."""
    owner = read_owner(run)
    return (run / LOCK_FILE).stat().st_mtime_ns if owner is not None and owner.pid == learner else math.inf


def _take_judge_down(scene: Scene, fault: Fault) -> Committed:
    judge = scene.judge
    if judge is None:
        return Committed(None)
    num_before = judge.num_refusals
    judge.be_down(fault.duration_s, scene.victims.pause)
    num_refused = judge.num_refusals - num_before
    detail = f"the judge of the rewards was down for {fault.duration_s:.1f} s, and refused {num_refused} requests"
    return Committed(detail, has_hit=num_refused > 0)


def _strike_tools(tools: Tools, fault: Fault, pause: Callable[[float], None]) -> Struck:
    match fault.kind:
        case "kill environment":
            return tools.kill_caller(pause)
        case "wedge tool":
            return tools.wedge(pause)
        case "leave daemon":
            return tools.leave_daemon(pause)
        case _:
            return tools.be_down(fault.duration_s, pause)


def _fill_disk_in_checkpoint(scene: Scene, fault: Fault) -> Committed:
    if scene.disk is None:
        return Committed(None)
    # The rest is filled in a moment, and hits a checkpoint that is written in a moment.
    scene.disk.fill(NEARLY_FULL_BYTES)
    partial = _await_checkpoint(scene)
    scene.disk.fill(0)
    scene.victims.pause(fault.duration_s)
    scene.disk.empty()
    while_writing = f"while the learner wrote {partial.name}, " if partial else ""
    return Committed(f"{while_writing}left no room for {fault.duration_s:.1f} s")


def _take_descriptors(scene: Scene, fault: Fault) -> Committed:
    num_made = crowd(
        scene.network.learner_host,
        scene.hub_port,
        size=NUM_STRANGERS,
        duration_s=fault.duration_s,
        pause=scene.victims.pause,
    )
    detail = f"{num_made} silent connections to the hub in {fault.duration_s:.1f} s"
    # Connections are replaced when the hub has closed them.
    return Committed(detail, has_hit=num_made > NUM_STRANGERS)


def _jump_clock(scene: Scene, fault: Fault, generator: random.Random) -> Committed:
    offsets_s = {role: generator.uniform(-DAY_S, DAY_S) for role in ("learner", "actor")}
    scene.clock.jump("learner", offsets_s["learner"])
    scene.clock.jump("actor", offsets_s["actor"])
    scene.victims.pause(fault.duration_s)
    scene.clock.jump("learner", 0.0)
    scene.clock.jump("actor", 0.0)
    said = ", ".join(f"{role} {offset_s / 3600:+.1f} h" for role, offset_s in offsets_s.items())
    return Committed(f"{said} for {fault.duration_s:.1f} s")


def _start_second_learner(scene: Scene) -> Committed:
    learner = scene.victims.find("learner")
    if not _wait(scene.victims, lambda: _has_settled(scene.run, learner)):
        return Committed(None)
    violations = _try_refused(scene, "run.dir", "a second learner")
    if processes.has_ended(learner):
        violations.append("the learner ended beside a second one")
    return Committed("started a second learner", violations=tuple(violations))


def _has_settled(run: Path, learner: int) -> bool:
    """Return whether the learner has locked the run's folder and then written its settings there."""
    return (run / CONFIG_FILE).stat().st_mtime_ns >= _locked_at(run, learner)


def _resume_with_changes(scene: Scene) -> Committed:
    """Kill the learner, and try to resume with the rows of the data reversed before the launcher restarts it."""
    if scene.train_data.suffix != ".jsonl":
        return Committed(None)
    data = scene.run.parent / "reversed.jsonl"
    data.write_text("".join(reversed(scene.train_data.read_text().splitlines(keepends=True))))
    with _learner_killed(scene):
        violations = _try_refused(scene, "data.train_data", "a resume with reversed data", f"data.train_data={data}")
    return Committed("killed the learner and resumed with reversed data", violations=tuple(violations))


def _resume_with_another_log(scene: Scene) -> Committed:
    """Kill the learner, and try to resume with a log segment of another run before the launcher restarts it."""
    log = scene.run / LOG
    with _learner_killed(scene):
        number = 1 + max((int(path.stem) for path in log.glob("*.log")), default=0)
        # As the other run's log rolls over: without the event with which a learner begins.
        header = encode_header(SegmentHeader("another", number, Position(number - 1, HEADER_BYTES)))
        event = Expired(at=0.0, lease_id=1, reason="lost")
        foreign = log / f"{number:08d}.log"
        foreign.write_bytes(header + b"".join(encode_record(HEADER_BYTES, event)))
        violations = _try_refused(scene, "run.resume", "a resume with another run's log")
        foreign.unlink()
    return Committed(f"killed the learner and resumed with {foreign.name} of another run", violations=tuple(violations))


@contextlib.contextmanager
def _learner_killed(scene: Scene) -> Iterator[None]:
    """Kill the learner, and let the launcher restart it at the end."""
    learner, launcher = scene.victims.find("learner"), scene.victims.find("launcher")
    os.kill(launcher, signal.SIGSTOP)
    try:
        kill_and_wait(learner)
        yield
    finally:
        os.kill(launcher, signal.SIGCONT)


def _let_strangers_speak(scene: Scene) -> Committed:
    learner = scene.victims.find("learner")
    num_said = speak(scene.network.learner_host, scene.hub_port)
    scene.victims.pause(STRANGERS_S)
    violations = ("strangers of other protocols ended the learner",) if processes.has_ended(learner) else ()
    return Committed(f"{num_said} strangers spoke other protocols to the hub", violations=violations, has_hit=num_said > 0)


def _append_data(scene: Scene) -> Committed:
    """Add rows to the end of the training data, and kill the learner; the launcher resumes the run with them."""
    more = scene.train_data.with_name(MORE_DATA)
    if not more.exists():
        return Committed(None)
    # Renamed into place: a learner that is starting reads the old rows or all of them.
    grown = scene.train_data.with_name("grown.jsonl")
    grown.write_text(scene.train_data.read_text() + more.read_text())
    learner = scene.victims.find("learner")
    grown.rename(scene.train_data)
    kill_and_wait(learner)
    return Committed(f"killed the learner and added {len(more.read_text().splitlines())} rows to the data")


def _try_refused(scene: Scene, setting: str, what: str, *settings: str) -> list[str]:
    """Return a violation unless a learner is refused for this setting, and one where it has changed the run's config."""
    config = (scene.run / CONFIG_FILE).read_bytes()
    attempt = scene.victims.try_learner(*settings)
    violations: list[str] = []
    if attempt.status != USER_ERROR_STATUS or setting not in attempt.said:
        violations.append(f"{what} was not refused for {setting}: exit status {attempt.status}, {attempt.said[-500:]}")
    if (scene.run / CONFIG_FILE).read_bytes() != config:
        violations.append(f"{what} changed {CONFIG_FILE}")
    return violations
