"""A dispatcher with hand-made messages and a clock that the test moves, for all tests of learner/dispatch."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from offbeat.common.records.rows import EvalRow, EventRow, Row
from offbeat.common.settings.config import (
    Config,
    DataSection,
    EvaluationSection,
    HubSection,
    ModelSection,
    RolloutSection,
    RunSection,
    StalenessSection,
)
from offbeat.common.settings.learning_sections import LossSection, TrainSection
from offbeat.common.settings.loading import replace_settings
from offbeat.learner.dispatch.canary import Canary, CanaryVerdict
from offbeat.learner.dispatch.contract import Contract
from offbeat.learner.dispatch.dispatcher import Dispatcher, Listeners
from offbeat.learner.dispatch.live_settings import LiveSettings
from offbeat.learner.dispatch.run_state import Versions
from offbeat.learner.dispatch.send_queue import Outgoing
from offbeat.learner.leases.events import LeaseEvent
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.learner.leases.journal import LeaseJournal
from offbeat.learner.leases.ledger import Ledger
from offbeat.learner.leases.log_reading import LogFullError, Position, Record, read_log
from offbeat.learner.leases.prompt_stream import PromptStream
from offbeat.learner.leases.prompts import Prompt, Prompts
from offbeat.learner.leases.recovery import Recovered
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.keys import NO_KEYS, Sender
from offbeat.protocols.message_parts import EngineInfo, ModelHashes
from offbeat.protocols.messages import (
    Ack,
    ActorHeartbeat,
    ActorMessage,
    ActorStats,
    Credit,
    GroupDone,
    Hello,
    LearnerMessage,
    Lease,
    LiveSettingsReport,
    LiveSettingsRequest,
    StatusReport,
    StatusRequest,
    TensorSpec,
    WeightsCommitted,
    WeightsStaged,
)
from offbeat.protocols.payload import CompletionMeta, Segment

GROUP_SIZE = 2
MAX_NEW_TOKENS = 4
VOCABULARY_SIZE = 50
LEASE_TIMEOUT_S = 100.0
DEAD_AFTER_S = 15.0
NUM_PROMPTS = 20
TICK_S = DEAD_AFTER_S / 3
"""Seconds per tick; a longer gap counts as the dispatcher's own absence."""
HASHES = ModelHashes(config="c0", tokenizer="t0", chat_template="x0")
ENGINE = EngineInfo("vllm", "1", "float32", "cpu", 64, HASHES)
CONTRACT = Contract(
    run_id="run",
    learner_incarnation=77,
    layout=(TensorSpec("w", (2,), "float32"),),
    canary_token_ids=np.array([1, 2, 3], np.int32),
    dtype="float32",
    hashes=HASHES,
    max_length=64,
    vocabulary_size=VOCABULARY_SIZE,
    temperature=0.7,
    reward="rewards:solved",
    software="1.0",
    max_message_bytes=1 << 20,
)
CONFIG = Config(
    run=RunSection(max_failed_leases=100),
    model=ModelSection(path="model"),
    data=DataSection(train_data="data.jsonl"),
    rollout=RolloutSection(
        group_size=GROUP_SIZE, max_new_tokens=MAX_NEW_TOKENS, temperature=0.7, lease_timeout_s=LEASE_TIMEOUT_S
    ),
    evaluation=EvaluationSection(num_prompts=3),
    hub=HubSection(dead_after_s=DEAD_AFTER_S, max_actors=100),
    staleness=StalenessSection(max_staleness=1, target="bound"),
    loss=LossSection(zero_variance="count"),
    train=TrainSection(groups_per_step=2, num_steps=50),
)
"""The default settings of a test."""
OPERATOR = Sender("ops", "operator")

M = TypeVar("M", bound=LearnerMessage)
R = TypeVar("R", bound=Row)


class Actor:
    """A test's actor: sends messages, and reads the answers."""

    def __init__(self, desk: "Desk", name: str, *, incarnation: int = 1, sender: Sender = NO_KEYS) -> None:
        self.desk = desk
        self.name = name
        self.incarnation = incarnation
        self.sender = sender
        self.peer = f"{name}/{incarnation}".encode()
        self.capacity = 0

    def say(self, message: ActorMessage, *arrays: np.ndarray) -> None:
        frames = [memoryview(array.tobytes()) for array in arrays]
        self.desk.dispatcher.handle(self.peer, message, frames, self.desk.now, self.sender)

    def hello(self, **fields: Any) -> None:
        self.say(make_hello(actor=self.name, incarnation=self.incarnation, **fields))

    def credit(self, capacity: int) -> None:
        self.capacity = capacity
        self.say(Credit(capacity=capacity))

    def beat(self, *lease_ids: int, seen: int = -1, policy_version: int = 0, stats: ActorStats | None = None) -> None:
        """Send the heartbeat of an actor that holds these leases."""
        stats = stats or ActorStats()
        self.say(
            ActorHeartbeat(policy_version=policy_version, stats=stats, lease_ids=lease_ids, seen_lease_id=seen),
        )

    def join(self, *, capacity: int, policy_version: int | None = 0, lease_ids: Sequence[int] = ()) -> "Actor":
        """Say hello, offer capacity and commit weights; None: commit none."""
        self.hello(lease_ids=tuple(lease_ids))
        self.credit(capacity)
        if policy_version is not None:
            self.commit(policy_version)
        return self

    def commit(self, policy_version: int) -> None:
        self.say(WeightsCommitted(policy_version=policy_version, stall_s=0.0))

    def heard(self, kind: type[M]) -> list[M]:
        """Return the messages of this kind that it was sent and has not read."""
        return [message for message in self.desk.take(self.peer, kind) if isinstance(message, kind)]

    def leases(self) -> list[Lease]:
        """Return the leases that the next tick brings."""
        self.desk.tick()
        return self.heard(Lease)

    def answer(
        self,
        lease_id: int,
        *,
        rewards: Sequence[float] = (0.0, 1.0),
        policy_version: int = 0,
        ids: Sequence[int] = (1, 2),
        logprobs: Sequence[float] = (-0.5, -1.0),
    ) -> Ack:
        """Send a group of equal completions; return the learner's answer."""
        self.send_group(lease_id, rewards=rewards, policy_version=policy_version, ids=ids, logprobs=logprobs)
        (ack,) = self.heard(Ack)
        assert ack.lease_id == lease_id
        return ack

    def send_group(
        self,
        lease_id: int,
        *,
        rewards: Sequence[float] = (0.0, 1.0),
        policy_version: int = 0,
        ids: Sequence[int] = (1, 2),
        logprobs: Sequence[float] = (-0.5, -1.0),
    ) -> None:
        completions = tuple(CompletionMeta(len(ids), "stop", reward, (Segment(policy_version, 0),)) for reward in rewards)
        done = GroupDone(lease_id=lease_id, completions=completions, generate_s=0.1)
        self.say(
            done,
            np.array([*ids] * len(rewards), dtype=np.int32),
            np.array([*logprobs] * len(rewards), dtype=np.float32),
        )

    def send_completions(self, lease_id: int, *completions: CompletionMeta) -> Ack:
        """Send a group of completions of one token each; return the learner's answer."""
        num_tokens = len(completions)
        done = GroupDone(lease_id=lease_id, completions=completions, generate_s=0.1)
        self.say(done, np.ones(num_tokens, np.int32), np.full(num_tokens, -0.5, np.float32))
        (ack,) = self.heard(Ack)
        return ack


class ScriptedCanary(Canary):
    """Notes every score and answers with the desk's verdict."""

    def __init__(self, desk: "Desk") -> None:
        self._desk = desk

    def joined(self, actor: str) -> None: ...

    def judge(self, actor: str, policy_version: int, logprobs: np.ndarray) -> CanaryVerdict | None:
        self._desk.canaries.append((actor, policy_version, logprobs.tolist()))
        return self._desk.verdict

    def measure_floor(self, actor: str, logprobs: np.ndarray) -> None:
        self._desk.file_scores.append((actor, logprobs.tolist()))


class Desk:
    """A dispatcher with its clock, its outgoing messages and its rows."""

    def __init__(
        self,
        *settings: str,
        config: Config = CONFIG,
        num_prompts: int = NUM_PROMPTS,
        num_eval_prompts: int = 3,
        recovered: Recovered | None = None,
        policy_version: int = 0,
        evaluated: int = -1,
        is_published: bool = True,
        log: RolloutLog | None = None,
        contract: Contract = CONTRACT,
        tasks: Sequence[str] = (),
    ) -> None:
        """`settings` are those of `config` to change, as `section.key=value`; `tasks` are those of the prompts, in turn."""
        recovered = recovered or make_recovered(num_prompts, tasks=tasks)
        self.now = 1000.0
        self.rows: list[Row] = []
        self.evaluated: list[dict[int, list[float]]] = []
        """Rewards of the completions of each finished evaluation, by prompt."""
        self.joined: list[bytes] = []
        self.weights: list[tuple[str, WeightsStaged | WeightsCommitted]] = []
        self.weight_problems: list[str] = []
        self.verdict: CanaryVerdict | None = None
        """The judgement on every score of the canary that a test sends."""
        self.canaries: list[tuple[str, int, list[float]]] = []
        self.file_scores: list[tuple[str, list[float]]] = []
        self.routings: list[tuple[str, int, list[list[list[int]]]]] = []
        self.distrusted: list[tuple[bytes, str, str]] = []
        self.unread: list[Outgoing] = []
        self.ledger = recovered.ledger
        self.stream = recovered.stream
        self.versions = Versions(policy_version, recovered.newest_version, evaluated=evaluated)
        self.journal = LeaseJournal(log, recovered.ledger, recovered.stream, lambda: self.now - 993.0)
        self.dispatcher = Dispatcher(
            contract,
            LiveSettings(with_settings(config, *settings), recovered.tuned),
            Prompts(
                make_prompts(num_prompts, "train", tasks),
                make_prompts(num_eval_prompts, "held-out"),
                lambda token_ids: " ".join(map(str, token_ids)),
            ),
            self.journal,
            self.versions,
            ScriptedCanary(self),
            Listeners(
                joined=self.joined.append,
                introduced=lambda hello: None,
                weights=lambda actor, message: self.weights.append((actor, message)),
                distrusted=lambda peer, actor, why: self.distrusted.append((peer, actor, why)),
                routed=lambda actor, version, experts: self.routings.append((actor, version, experts.tolist())),
                evaluated=self._finish_evaluation,
                weight_problems=lambda: self.weight_problems,
            ),
            self.rows.append,
            lambda: self.now,
        )
        # Tests look at these; nothing else outside of the dispatcher does.
        self.settings = self.dispatcher._settings
        self.roster = self.dispatcher._roster
        self.lease_desk = self.dispatcher._desk
        self.evaluations = self.dispatcher._evaluations
        self.watchdog = self.dispatcher._watchdog
        self.failures = self.dispatcher._failures
        if is_published:
            self.dispatcher.publish(policy_version)

    def _finish_evaluation(self, row: EvalRow, rollouts: Mapping[int, tuple[Rollout, ...]]) -> None:
        self.rows.append(row)
        self.evaluated.append({prompt: [one.reward for one in of_prompt] for prompt, of_prompt in rollouts.items()})

    def tick(self, seconds: float = 0.0, *alive: Actor) -> None:
        """Let time pass, in steps as the hub thread would; actors that are `alive` are heard at each."""
        end = self.now + seconds
        while True:
            self.now = min(end, self.now + TICK_S)
            for actor in alive:
                actor.say(Credit(capacity=actor.capacity))
            self.jump(0.0)
            if self.now >= end:
                return

    def jump(self, seconds: float) -> None:
        """Tick once, this late."""
        self.now += seconds
        self.dispatcher.tick(self.now)
        counts = self.dispatcher.counts()
        assert counts.adds_up, counts
        desk, roster = self.lease_desk, self.roster
        assert {member.name for member in desk.with_room(roster)} == {
            member.name for member in roster if member.takes_leases and member.free > 0
        }
        assert desk.is_log_full or min(desk.deadlines.values(), default=self.now) >= self.now, "a lease is late"

    def take(self, peer: bytes, kind: type) -> list[LearnerMessage]:
        self.unread += self.dispatcher.take_outgoing()
        taken = [outgoing for outgoing in self.unread if outgoing.peer == peer and isinstance(outgoing.message, kind)]
        self.unread = [outgoing for outgoing in self.unread if not any(outgoing is other for other in taken)]
        return [outgoing.message for outgoing in taken]

    def rows_of(self, kind: type[R]) -> list[R]:
        return [row for row in self.rows if isinstance(row, kind)]

    def events(self, name: str) -> list[EventRow]:
        return [row for row in self.rows_of(EventRow) if row.event == name]

    def status(self, sender: Sender = NO_KEYS) -> StatusReport:
        """Return the report that an operator gets."""
        peer = b"operator"
        self.dispatcher.handle(peer, StatusRequest(), (), self.now, sender)
        (report,) = self.take(peer, StatusReport)
        assert isinstance(report, StatusReport)
        return report

    def tune(self, sender: Sender = NO_KEYS, **settings: str) -> LiveSettingsReport:
        """Return the answer to an operator who asks for `section__key="value"`."""
        peer = b"operator"
        named = {name.replace("__", "."): value for name, value in settings.items()}
        self.dispatcher.handle(peer, LiveSettingsRequest(settings=named, who="me@host"), (), self.now, sender)
        (report,) = self.take(peer, LiveSettingsReport)
        assert isinstance(report, LiveSettingsReport)
        return report

    def batch(self) -> list[Group] | None:
        return self.dispatcher.take_batch(0.0)

    def train(self) -> list[Group]:
        """Take a batch, which must be there, and make one step on it."""
        groups = self.batch()
        assert groups is not None
        version = self.versions.current + 1
        self.dispatcher.finish_batch(groups, version)
        self.dispatcher.publish(version)
        return groups


class WillingLog(RolloutLog):
    """A real log that the test can make refuse records."""

    will_append = True
    has_room = True
    num_commits = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 20, min_free_bytes=0)
        self.folder = folder

    @property
    def is_full(self) -> bool:
        return not self.has_room

    def append(self, event: LeaseEvent, *arrays: Any) -> Position:
        if not self.will_append:
            raise LogFullError("no space left on device")
        return super().append(event, *arrays)

    def commit(self) -> None:
        super().commit()
        self.num_commits += 1

    def records(self) -> list[Record]:
        """Return the records that a restart would read."""
        return list(read_log(self.folder))

    def events(self) -> list[LeaseEvent]:
        return [record.event for record in self.records()]


def with_settings(config: Config, *settings: str) -> Config:
    """Return a config with other settings, given as `section.key=value`."""
    return replace_settings(config, dict(setting.split("=", 1) for setting in settings))


def make_recovered(num_prompts: int = NUM_PROMPTS, newest_version: int = 0, tasks: Sequence[str] = ()) -> Recovered:
    """Return the state of a run that has not begun; `newest_version` was made by a learner that died."""
    names = [prompt.task for prompt in make_prompts(num_prompts, "train", tasks)]
    return Recovered(PromptStream(num_prompts, seed=0, tasks=names), Ledger(), newest_version, 0, {})


def make_hello(actor: str = "a", incarnation: int = 1, **fields: Any) -> Hello:
    """Return a hello that agrees with `CONTRACT`, but for these fields."""
    given = {"engine": ENGINE, "temperature": 0.7, "reward": "rewards:solved", "software": "1.0", **fields}
    return Hello(actor=actor, incarnation=incarnation, **given)


def make_prompts(number: int, text: str, tasks: Sequence[str] = ()) -> list[Prompt]:
    """Return prompts, each of the next of the tasks in turn."""
    names = itertools.cycle(tasks or [""])
    return [
        Prompt(index, f"{text} {index}", np.array([index], np.int32), f'{{"row": {index}}}', task=next(names))
        for index in range(number)
    ]


def prompts_in_order() -> Iterator[int]:
    """Yield the prompts in the order of the stream."""
    stream = PromptStream(NUM_PROMPTS, seed=0)
    while True:
        yield stream.next().prompt_id
