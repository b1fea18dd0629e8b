"""Runs of the learner's machinery whose engines and trainer sleep: real actors, hub, dispatcher and weight publisher."""

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from offbeat.common.processes.environment import prepare_environment
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.rows import GroupRow, Row, WeightsRow
from offbeat.common.settings.config import ActorSection, Config, HubSection, TaskSection
from offbeat.common.weights.flat import make_layout
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.hub import ActorLink, HubThread
from offbeat.protocols.channels import Hub, Link
from tests.benchmarks.measuring import (
    Cost,
    receive_from,
)
from tests.benchmarks.stand_ins import (
    MAX_MESSAGE_BYTES,
    PATIENCE_S,
    TOKEN_S,
    NoTokenizer,
    SleepEngine,
    make_dispatcher,
    make_publisher,
    no_reward,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NUM_ACTORS = 4
GROUPS_PER_STEP = 16
GROUPS_PER_ACTOR = 4
GROUP_SIZE = 8
NUM_STEPS = 20
MEAN_COMPLETION_S = 0.05
LAYOUT = make_layout([("weights", (1 << 18,))], torch.float32)
STEPS_LEFT_OUT = 4
"""Steps left out at either end of a run, because the ideals and the law of the lag describe the steady state."""
SAMPLE_S = 0.01
START_S = 300.0
"""Longest time for an actor's imports, on a machine that has other work too."""


class Workload(NamedTuple):
    """The times of generation and training."""

    sigma: float
    """Standard deviation of the logarithm of a completion's time; at 1 the 99th percentile is ten times the median."""
    train_share: float
    """T as a multiple of `B E[X] / N`: below 1 the actors are the bottleneck, above 1 the trainer."""

    @property
    def train_s(self) -> float:
        """Seconds of one training step."""
        num_groups = GROUPS_PER_STEP * NUM_STEPS
        group_s = mean(max(completion_tokens(self.sigma, lease)) * TOKEN_S for lease in range(num_groups))
        return self.train_share * group_s * GROUPS_PER_STEP / (NUM_ACTORS * GROUPS_PER_ACTOR)


@functools.cache
def completion_tokens(sigma: float, lease_id: int) -> list[int]:
    """Return the lengths of a lease's completions, which depend on neither actor nor staleness."""
    generator = np.random.default_rng([round(10 * sigma), lease_id])
    seconds = generator.lognormal(math.log(MEAN_COMPLETION_S) - sigma**2 / 2, sigma, GROUP_SIZE)
    return [max(1, round(of_completion / TOKEN_S)) for of_completion in seconds]


class Trial(NamedTuple):
    """One run of all steps."""

    cost: Cost
    """The cost from the first published weights to the last step."""
    step_s: float
    """Mean seconds of a steady step."""
    train_s: float
    wait_share: float
    """Share of waiting in the trainer's time, in the steady steps."""
    group_s: list[float]
    """Generation time of every group, in the order of training."""
    lags: list[int]
    """Policy lags of the groups of the steady steps."""
    num_open: float
    """L, the mean number of groups begun and not yet trained on, in the steady steps."""
    publish_s: float
    """Mean seconds from the start of a weight update until the last actor has it."""

    @property
    def turnaround_s(self) -> float:
        """Mean seconds from the end of a group to the next one's start in the same slot, if the actors are the bottleneck."""
        return self.step_s * NUM_ACTORS * GROUPS_PER_ACTOR / GROUPS_PER_STEP - mean(self.group_s)

    @property
    def longest_s(self) -> float:
        """Mean over the steps of the longest generation time in a step."""
        steps = [self.group_s[index : index + GROUPS_PER_STEP] for index in range(0, len(self.group_s), GROUPS_PER_STEP)]
        return mean(map(max, steps))


def act(connection: Connection) -> None:
    """Run one actor after another. A command is `(hub address, name, sigma)`, its result CPU seconds."""
    prepare_environment()
    # Imported here, because transformers needs the prepared environment.
    from offbeat.actor.contact import ActorIdentity
    from offbeat.actor.leases_at_work import LeasesAtWork, Outbox
    from offbeat.actor.rewards.runner import RewardRunner
    from offbeat.actor.sampling import SingleTurns
    from offbeat.actor.service import ActorService

    torch.set_num_threads(1)
    connection.send("up")
    while True:
        address, name, sigma = connection.recv()
        started = time.process_time()
        engine = SleepEngine(lambda request_id, sigma=sigma: _length(sigma, request_id))
        config = Config(hub=HubSection(address=address), actor=ActorSection(max_inflight_groups=GROUPS_PER_ACTOR))
        reward = f"{no_reward.__module__}:{no_reward.__name__}"
        identity = ActorIdentity(name, time.time_ns())
        with (
            contextlib.closing(RewardRunner(TaskSection(reward=reward), config.actor)) as rewards,
            Link(address, identity=identity.peer(), max_message_bytes=MAX_MESSAGE_BYTES) as link,
        ):
            outbox = Outbox(resend_after_s=config.hub.dead_after_s)
            play = SingleTurns(engine, cast("PreTrainedTokenizerBase", NoTokenizer()), rewards)
            ActorService(
                identity=identity,
                config=config,
                engine=engine,
                leases=LeasesAtWork(engine, play, outbox, max_message_bytes=MAX_MESSAGE_BYTES),
                link=link,
                stop=StopRequest(),
            ).run()
        connection.send(time.process_time() - started)


def _length(sigma: float, request_id: str) -> int:
    lease_id, index = request_id.split("/")
    return completion_tokens(sigma, int(lease_id))[int(index)]


class SleepLearner:
    """The learner's training loop with a sleep for the trainer."""

    def __init__(self, hub: Hub, workload: Workload, max_staleness: int) -> None:
        self._hub = hub
        self._train_s = workload.train_s
        self._rows: list[Row] = []
        self._num_training = 0
        self._samples: list[tuple[float, float]] = []
        """Pairs of time and number of groups begun but not trained on."""
        self._is_over = False
        self._publisher = make_publisher(LAYOUT, num_actors=NUM_ACTORS, max_staleness=max_staleness, record=self._record)
        self._dispatcher: Dispatcher = make_dispatcher(
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS_PER_STEP,
            num_steps=NUM_STEPS,
            max_staleness=max_staleness,
            layout=LAYOUT,
            record=self._record,
            on_join=self._publisher.joined,
            on_weights=self._publisher.handle,
        )
        self._hub_thread = HubThread(hub, self._dispatcher)

    def run(self) -> Trial:
        """Run all steps. The CPU seconds of the trial are those of this process."""
        self._hub_thread.start()
        self._await(lambda: len(self._dispatcher.members()) == NUM_ACTORS)
        self._publisher.start(ActorLink(self._dispatcher, self._hub_thread, PATIENCE_S))
        sampler = threading.Thread(target=self._sample, daemon=True)
        sampler.start()
        cpu_before, started = time.process_time(), time.monotonic()
        self._publish(0)
        ends, waits, trains = [started], [], []
        for policy_version in range(1, NUM_STEPS + 1):
            wait_s, train_s = self._step(policy_version)
            ends.append(time.monotonic())
            waits.append(wait_s)
            trains.append(train_s)
        cost = Cost(ends[-1] - started, time.process_time() - cpu_before)
        self._is_over = True
        sampler.join()
        self._leave()
        steady = slice(STEPS_LEFT_OUT, NUM_STEPS - STEPS_LEFT_OUT)
        steady_s = ends[steady.stop] - ends[steady.start]
        groups = [row for row in self._rows if isinstance(row, GroupRow)]
        assert len(groups) == GROUPS_PER_STEP * NUM_STEPS
        return Trial(
            cost=cost,
            step_s=steady_s / (steady.stop - steady.start),
            train_s=mean(trains),
            wait_share=sum(waits[steady]) / steady_s,
            group_s=[row.generate_s for row in groups],
            lags=[row.policy_lag for row in groups if steady.start <= row.policy_version < steady.stop],
            num_open=mean(num_open for at, num_open in self._samples if ends[steady.start] <= at < ends[steady.stop]),
            publish_s=mean(row.publish_s for row in self._rows if isinstance(row, WeightsRow)),
        )

    def _step(self, policy_version: int) -> tuple[float, float]:
        """Take one step like the learner's loop; return the seconds waited for rollouts and the seconds trained."""
        started = time.monotonic()
        groups = self._dispatcher.take_batch(PATIENCE_S)
        assert groups is not None, self._dispatcher.waiting_for()
        taken = time.monotonic()
        self._num_training = len(groups)
        time.sleep(self._train_s)
        self._dispatcher.finish_batch(groups, policy_version)
        self._num_training = 0
        self._hub.wake()
        trained = time.monotonic()
        self._publish(policy_version)
        return taken - started, trained - taken

    def _publish(self, policy_version: int) -> None:
        with self._publisher.writing() as buffer:
            buffer.flat.fill_(policy_version)
            self._publisher.publish(policy_version)
            self._dispatcher.publish(policy_version)
        self._hub.wake()

    def _leave(self) -> None:
        self._publisher.close()
        self._dispatcher.stop("finished")
        self._hub.wake()
        self._dispatcher.wait_left(PATIENCE_S)
        self._hub_thread.close()

    def _sample(self) -> None:
        while not self._is_over:
            num_ready, num_in_flight = self._dispatcher.buffer_sizes()
            self._samples.append((time.monotonic(), num_ready + num_in_flight - self._num_training))
            time.sleep(SAMPLE_S)

    def _await(self, claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not claim():
            assert time.monotonic() < deadline, self._dispatcher.waiting_for()
            time.sleep(0.005)

    def _record(self, row: Row) -> None:
        self._rows.append(row)


def measure_sleep(connections: list[Connection], workload: Workload, max_staleness: int) -> Trial:
    """Run one trial with these actors' processes."""
    with Hub("tcp://127.0.0.1:0", max_message_bytes=MAX_MESSAGE_BYTES) as hub:
        learner = SleepLearner(hub, workload, max_staleness)
        for index, connection in enumerate(connections):
            connection.send((hub.address, f"actor-{index}", workload.sigma))
        trial = learner.run()
        actors_cpu_s = sum(receive_from(connection) for connection in connections)
    return trial._replace(cost=Cost(trial.cost.wall_s, trial.cost.cpu_s + actors_cpu_s))
