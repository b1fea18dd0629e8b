"""Under any fates of transfers and actors, every actor that lives has the newest weights in the end, by gloo and by NCCL."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.learner.weights import publisher as publisher_module
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.learner.weights.collective import Absent, BroadcastOutcome
from offbeat.learner.weights.double_buffer import WeightSnapshot
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.transport import LearnerGpu, Transport
from offbeat.protocols.messages import WeightsStaged
from tests.learner.weights.weight_fakes import LAYOUT, TRANSPORT, FakeServer

Fate = Literal["sent", "fails for all", "a member is late", "a member dies", "a member breaks"]
FATES: tuple[Fate, ...] = ("sent", "fails for all", "a member is late", "a member dies", "a member breaks")
NAMES = "abcd"
STEP_S = 1.0
MAX_STEPS = 400
"""More than the longest exclusion and some pauses; a loop without an end needs more."""


class Bench:
    """A publisher whose two threads the test is, on a clock of the test; collectives meet the drawn fates."""

    def __init__(self, fates: list[Fate], last: Fate, gpus: Sequence[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
        self.fates, self.last = fates, last
        self.now = 1000.0
        self.num_births = 0
        self.errors: dict[str, str] = {}
        self.live: dict[str, Recipient] = {}
        self.gpus = dict(zip(NAMES, gpus, strict=False))
        for name in NAMES:
            self.be_born(name)
        self.failures: list[BaseException] = []
        monkeypatch.setattr(publisher_module, "WeightServer", lambda **_: FakeServer())
        monkeypatch.setattr(publisher_module, "CollectiveUpdates", lambda *_: self)
        self.publisher = WeightPublisher(
            layout=LAYOUT,
            transport=self.transport(),
            open_hub=lambda: pytest.fail("the server is a fake"),
            max_pull_lag=lambda: 0,
            record=lambda row: None,
        )
        self.server: Any = self.publisher._server
        self.publisher._actor_versions._clock = self.publisher._failed._clock = lambda: self.now
        self.num_sends = 0

    def transport(self) -> Transport:
        backend = "nccl" if any(self.gpus.values()) else "gloo"
        return TRANSPORT._replace(backend=backend, gpu=LearnerGpu(0, "GPU-0") if backend == "nccl" else None)

    def be_born(self, name: str) -> None:
        self.num_births += 1
        self.live[name] = Recipient(f"{name}/{self.num_births}".encode(), name, None, self.gpus.get(name))

    # The learner's other parts

    def recipients(self) -> list[Recipient]:
        return list(self.live.values())

    def post(self, peer: bytes, message: object) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    # The collective

    def send(self, members: Sequence[Recipient], snapshot: WeightSnapshot, backend: str, **_: object) -> BroadcastOutcome:
        assert len({member.gpu for member in members}) == len(members) or backend == "gloo"
        self.num_sends += 1
        fate = self.fates.pop(0) if self.fates else self.last
        victim, others = members[0], members[1:]
        version = snapshot.policy_version
        match fate:
            case "fails for all":
                return BroadcastOutcome(is_sent=False, absent=[], error="NCCL did not answer")
            case "a member is late":
                return BroadcastOutcome(is_sent=False, absent=[Absent(victim, "was late")])
            case "a member dies":
                del self.live[victim.name]
                self.be_born(victim.name)
                return BroadcastOutcome(is_sent=False, absent=[], error="Connection reset by peer")
            case "a member breaks":
                self.errors[victim.name] = "bucket 1 of 1"
                self.commit(others, version)
            case "sent":
                self.commit(members, version)
        return BroadcastOutcome(is_sent=True, absent=[])

    def commit(self, members: Sequence[Recipient], version: int) -> None:
        for member in members:
            self.live[member.name] = member._replace(policy_version=version)

    def take_error(self, actor: str) -> str | None:
        return self.errors.pop(actor, None)

    def report(self, actor: str, epoch: int, error: str) -> None:
        pytest.fail("nobody reports by message here")

    def distrust_group(self) -> None:
        pass

    def close(self) -> None:
        pass

    # The threads

    def step(self) -> None:
        """Let the publisher's and the server's thread look once, and every puller pull."""
        self.now += STEP_S
        recipients = self.recipients()
        self.publisher._settle(recipients)
        if behind := self.publisher._behind(recipients, by_pull=False):
            self.publisher._update(behind, self, self)  # pyright: ignore[reportArgumentType]
        self.publisher._tend_pulls(self)
        for recipient in self.recipients():
            if recipient.peer in self.server.visitors and recipient.peer in self.publisher._pulls:
                version = self.server.lent_version
                self.publisher.handle(recipient.name, WeightsStaged(policy_version=version, epoch=-1))
                self.commit([recipient], version)

    def publish(self, policy_version: int) -> None:
        with self.publisher.writing():
            self.publisher.publish(policy_version)

    def have(self, policy_version: int) -> bool:
        return all(one.policy_version == policy_version for one in self.live.values())


@given(
    fates=st.lists(st.sampled_from(FATES), max_size=12),
    last=st.sampled_from(FATES),
    gpus=st.lists(st.sampled_from([None, "GPU-0", "GPU-1", "GPU-2"]), max_size=len(NAMES)),
)
@settings(max_examples=60, deadline=None)
def test_every_live_actor_has_the_newest_weights_whatever_becomes_of_transfers(
    fates: list[Fate], last: Fate, gpus: list[str | None]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        bench = Bench(list(fates), last, gpus, monkeypatch)
        for version in range(3):
            bench.publish(version)
            for _ in range(MAX_STEPS):
                if bench.have(version):
                    break
                bench.step()
            assert bench.have(version), (version, bench.live, bench.publisher.problems())
            assert not bench.failures
        # A loop would send at every step.
        assert bench.num_sends < len(fates) + MAX_STEPS / 4
