"""Asynchronous against synchronous training: the same rollouts under `max_staleness` 4 and 0.

    python -m tests.benchmarks.async_vs_sync sleep     # the machinery alone: generation and training are sleeps; 2.5 minutes
    python -m tests.benchmarks.async_vs_sync engine    # `offbeat train` on a tiny random model under vLLM; 3 minutes

`sleep` asks what leases, sockets, gate, buffer and weight updates cost beside compute. Everything but engine and trainer is
the product: actors in processes of their own, one hub, one publisher. With B groups in a step, N groups in flight, group
time X and training time T, the ideals are made of the times measured in the same trial:

    sync       E[longest of a step's B groups] + T
    async      max(B E[X] / N, T)
    colocated  E[longest of a step's B groups] + T / 2: synchronous, the devices of both services doing both in turn
    divisible  (B E[X] / N + T) / 2: no tail, no switching; no synchronous system reaches it

Here N = B: both modes have the same slots, and the actor uses as many devices as the trainer.

Lag: by Little's law E[policy lag] = L / B, L being the mean number of groups that were begun and not yet trained on. It
is N / B + 1/2 where actors are the bottleneck (plus the time a weight update takes), and `max_staleness` where the trainer is.
"""

import contextlib
import functools
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
import torch

from offbeat.common.config import (
    ActorSection,
    Config,
    HubSection,
    MetricsSection,
    ModelSection,
    RolloutSection,
    TaskSection,
    TrainSection,
)
from offbeat.common.environment import prepare_environment
from offbeat.common.rows import GroupRow, Row, StepRow, WeightsRow
from offbeat.common.settings import resolved_toml
from offbeat.common.shutdown import StopRequest
from offbeat.common.weights import make_layout
from offbeat.learner.actor_link import ActorLink
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.hub_thread import HubThread
from offbeat.protocols.channels import Hub, Link
from tests.benchmarks.measuring import (
    NUM_ROUNDS,
    Cost,
    OffbeatRun,
    actor_shares,
    learner_shares,
    print_table,
    processes,
    run_offbeat,
    spread,
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

MAX_STALENESS = {"sync": 0, "async": 4}


# Sleeping: the workload

NUM_ACTORS = 4
GROUPS_PER_STEP = 16
GROUPS_PER_ACTOR = 4
GROUP_SIZE = 8
NUM_STEPS = 20
MEAN_COMPLETION_S = 0.05
LAYOUT = make_layout([("weights", (1 << 18,))], torch.float32)
STEPS_LEFT_OUT = 4
"""At either end, where the ideals and the law of the lag are asked for: they are about the steady state."""
SAMPLE_S = 0.01


class Workload(NamedTuple):
    """What generation and training take."""

    sigma: float
    """Of the logarithm of a completion's time; at 1 the 99th percentile is ten times the median."""
    train_share: float
    """T as a multiple of `B E[X] / N`: below 1 the actors are the bottleneck, above 1 the trainer."""

    @property
    def train_s(self) -> float:
        """Seconds of one training step."""
        num_groups = GROUPS_PER_STEP * NUM_STEPS
        group_s = mean(max(completion_tokens(self.sigma, lease)) * TOKEN_S for lease in range(num_groups))
        return self.train_share * group_s * GROUPS_PER_STEP / (NUM_ACTORS * GROUPS_PER_ACTOR)


WORKLOADS = (Workload(0.5, 0.5), Workload(1.0, 0.5), Workload(1.0, 1.5))


@functools.cache
def completion_tokens(sigma: float, lease_id: int) -> list[int]:
    """Tokens of a lease's completions: the same whoever generates them, and under whatever staleness."""
    generator = np.random.default_rng([round(10 * sigma), lease_id])
    seconds = generator.lognormal(math.log(MEAN_COMPLETION_S) - sigma**2 / 2, sigma, GROUP_SIZE)
    return [max(1, round(of_completion / TOKEN_S)) for of_completion in seconds]


class Trial(NamedTuple):
    """One run of all steps."""

    cost: Cost
    """From the first weights published to the last step."""
    step_s: float
    """Mean over the steady steps."""
    train_s: float
    wait_share: float
    """Of the trainer's time, in the steady steps."""
    group_s: list[float]
    """Generation time of every group, in the order of training."""
    lags: list[int]
    """Policy lags of the groups of the steady steps."""
    num_open: float
    """L, in the steady steps."""
    publish_s: float
    """From the start of a weight update to the last actor's copy of it, mean."""

    @property
    def turnaround_s(self) -> float:
        """Mean time between the end of a group and the start of the next in its slot, where the actors are the bottleneck."""
        return self.step_s * NUM_ACTORS * GROUPS_PER_ACTOR / GROUPS_PER_STEP - mean(self.group_s)

    @property
    def longest_s(self) -> float:
        """Mean over the steps of the longest generation time in a step."""
        steps = [self.group_s[index : index + GROUPS_PER_STEP] for index in range(0, len(self.group_s), GROUPS_PER_STEP)]
        return mean(map(max, steps))


# Sleeping: the processes


def act(connection: Connection) -> None:
    """One actor after another in this process; each command is `(hub address, name, sigma)`, each result CPU seconds."""
    prepare_environment()
    # Imported here: they import transformers, which wants the environment prepared.
    from offbeat.actor.contact import ActorIdentity
    from offbeat.actor.rewards import RewardRunner
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
            contextlib.closing(RewardRunner(reward, num_workers=1, timeout_s=PATIENCE_S)) as rewards,
            Link(address, identity=identity.peer(), max_message_bytes=MAX_MESSAGE_BYTES) as link,
        ):
            ActorService(
                identity=identity,
                config=config,
                engine=engine,
                tokenizer=cast("PreTrainedTokenizerBase", NoTokenizer()),
                rewards=rewards,
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
        """Time, and groups begun but not trained on."""
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
        """All steps; the CPU seconds are this process's."""
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
        """One step, as `Learner._train` takes it; seconds waited for rollouts, and trained."""
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
    """One trial with these actors."""
    with Hub("tcp://127.0.0.1:0", max_message_bytes=MAX_MESSAGE_BYTES) as hub:
        learner = SleepLearner(hub, workload, max_staleness)
        for index, connection in enumerate(connections):
            connection.send((hub.address, f"actor-{index}", workload.sigma))
        trial = learner.run()
        actors_cpu_s = sum(_receive(connection) for connection in connections)
    return trial._replace(cost=Cost(trial.cost.wall_s, trial.cost.cpu_s + actors_cpu_s))


def _receive(connection: Connection) -> Any:
    if not connection.poll(PATIENCE_S):
        raise TimeoutError(f"an actor did not answer within {PATIENCE_S:g} s")
    return connection.recv()


# Sleeping: the tables


def sleep() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    trials: dict[tuple[Workload, str], list[Trial]] = {}
    with processes(act, NUM_ACTORS) as connections:
        for connection in connections:
            _receive(connection)
        for _ in range(NUM_ROUNDS):
            for workload in WORKLOADS:
                for mode, max_staleness in MAX_STALENESS.items():
                    trials.setdefault((workload, mode), []).append(measure_sleep(connections, workload, max_staleness))
    pairs = [(workload, trials[workload, "sync"], trials[workload, "async"]) for workload in WORKLOADS]
    print_table(
        f"Machinery: {NUM_STEPS} steps of {GROUPS_PER_STEP} groups of {GROUP_SIZE}, {NUM_ACTORS} actors x {GROUPS_PER_ACTOR} "
        f"groups, {NUM_ROUNDS} interleaved rounds: median (min–max)",
        ("sigma", "T/gen", "sync s", "async s", "sync/async", "CPU s sync", "CPU s async", "trainer waits sync", "async"),
        [_sleep_row(*pair) for pair in pairs],
    )
    print_table(
        "Against the ideals, steady steps; the last two: how a colocated synchronous run compares with this asynchronous one",
        (
            *("sigma", "T/gen", "async step s", "ideal/async", "turnaround ms"),
            *("sync step s", "ideal/sync", "publish ms", "colocated/async", "divisible/async"),
        ),
        [_ideal_row(*pair) for pair in pairs],
    )
    print_table(
        "Policy lag under max_staleness 4, steady steps",
        ("sigma", "T/gen", "mean lag", "L/B", "lag / (L/B)", "law", "max lag", "groups above 4"),
        [_lag_row(workload, of_async) for workload, _, of_async in pairs],
    )


def _sleep_row(workload: Workload, of_sync: list[Trial], of_async: list[Trial]) -> list[str]:
    return [
        *_names(workload),
        spread([trial.cost.wall_s for trial in of_sync]),
        spread([trial.cost.wall_s for trial in of_async]),
        spread([one.cost.wall_s / other.cost.wall_s for one, other in zip(of_sync, of_async, strict=True)]),
        spread([trial.cost.cpu_s for trial in of_sync]),
        spread([trial.cost.cpu_s for trial in of_async]),
        spread([trial.wait_share for trial in of_sync]),
        spread([trial.wait_share for trial in of_async]),
    ]


def _ideal_row(workload: Workload, of_sync: list[Trial], of_async: list[Trial]) -> list[str]:
    pairs = list(zip(of_sync, of_async, strict=True))
    generate_s = [_generate_s(trial) for trial in of_async]
    return [
        *_names(workload),
        spread([trial.step_s for trial in of_async], 3),
        spread([max(busy, trial.train_s) / trial.step_s for busy, trial in zip(generate_s, of_async, strict=True)]),
        spread([trial.turnaround_s * 1000 for trial in of_async], 0) if _is_actor_bound(workload) else "",
        spread([trial.step_s for trial in of_sync], 3),
        spread([(trial.longest_s + trial.train_s) / trial.step_s for trial in of_sync]),
        spread([trial.publish_s * 1000 for trial in of_sync], 0),
        spread([(one.longest_s + one.train_s / 2) / other.step_s for one, other in pairs]),
        spread([(busy + trial.train_s) / 2 / trial.step_s for busy, trial in zip(generate_s, of_async, strict=True)]),
    ]


def _generate_s(trial: Trial) -> float:
    """`B E[X] / N`."""
    return mean(trial.group_s) * GROUPS_PER_STEP / (NUM_ACTORS * GROUPS_PER_ACTOR)


def _lag_row(workload: Workload, of_async: list[Trial]) -> list[str]:
    actors_law = NUM_ACTORS * GROUPS_PER_ACTOR / GROUPS_PER_STEP + 0.5
    law = actors_law if _is_actor_bound(workload) else MAX_STALENESS["async"]
    return [
        *_names(workload),
        spread([mean(trial.lags) for trial in of_async]),
        spread([trial.num_open / GROUPS_PER_STEP for trial in of_async]),
        spread([mean(trial.lags) * GROUPS_PER_STEP / trial.num_open for trial in of_async]),
        f"{law:.2f}",
        spread([max(trial.lags) for trial in of_async], 0),
        spread([sum(lag > MAX_STALENESS["async"] for lag in trial.lags) for trial in of_async], 0),
    ]


def _is_actor_bound(workload: Workload) -> bool:
    return workload.train_share < 1


def _names(workload: Workload) -> tuple[str, str]:
    return f"{workload.sigma:g}", f"{workload.train_share:g}"


# The real engine

ENGINE_STEPS = 8
ENGINE_GROUPS_PER_STEP = 8
ENGINE_TIMEOUT_S = 150.0


def engine() -> None:
    """Measure and print."""
    from transformers.utils.logging import disable_progress_bar

    from offbeat.deploy.quickstart.tiny_models import make_tiny_model

    disable_progress_bar()
    runs: dict[str, list[OffbeatRun]] = {mode: [] for mode in MAX_STALENESS}
    with tempfile.TemporaryDirectory(prefix="offbeat-benchmark-") as name:
        folder = Path(name)
        # Forty letters and the end: completions end after about 44 tokens, one in 300 not before the limit.
        make_tiny_model(folder / "model", alphabet="0123456789abcdefghijklmnopqrstuvwxyz+-=>")
        prompts = [{"prompt": f"{index:03d}+{index % 7}>", "answer": "none"} for index in range(64)]
        (folder / "train.jsonl").write_bytes(b"".join(msgspec.json.encode(prompt) + b"\n" for prompt in prompts))
        (folder / "run.toml").write_text(resolved_toml(_engine_config(folder)))
        for _ in range(NUM_ROUNDS):
            for mode, max_staleness in MAX_STALENESS.items():
                setting = f"staleness.max_staleness={max_staleness}"
                runs[mode].append(run_offbeat(str(folder / "run.toml"), setting, timeout_s=ENGINE_TIMEOUT_S))
    ratios = [_between_steps_s(one) / _between_steps_s(other) for one, other in zip(*runs.values(), strict=True)]
    print_table(
        f"offbeat train, tiny random model, vLLM, one actor, {ENGINE_STEPS} steps of {ENGINE_GROUPS_PER_STEP} groups of "
        f"{GROUP_SIZE}, first to last step, {NUM_ROUNDS} interleaved rounds: median (min–max)",
        ("", "seconds", "tokens/s", "busier/step", "mean lag", "max lag", "CPU s, start-up included"),
        [_engine_row(mode, of_mode) for mode, of_mode in runs.items()],
    )
    print(
        f"\nsync/async: {spread(ratios)}; colocated/async: {spread(_colocated_ratios(*runs.values()))}; "
        f"divisible/async: {spread([sum(_busy_s(run)) / 2 / _between_steps_s(run) for run in runs['async']])}"
    )
    shares = [
        [mode, _shares_text([learner_shares(run) for run in of_mode]), _actor_text(of_mode)] for mode, of_mode in runs.items()
    ]
    print_table("Shares of each service's time, first to last step", ("", "learner", "actor"), shares)


def _engine_config(folder: Path) -> Config:
    # No completion is ever right, so the policy stands still: both modes sample from one distribution of lengths.
    return Config(
        model=ModelSection(path=str(folder / "model"), dtype="float32", max_length=272),
        task=TaskSection(train_data=str(folder / "train.jsonl"), max_prompt_tokens=16),
        rollout=RolloutSection(group_size=GROUP_SIZE, max_new_tokens=256),
        # Small micro-batches: with all 64 completions in one, most of the training would be padding.
        train=TrainSection(num_steps=ENGINE_STEPS, groups_per_step=ENGINE_GROUPS_PER_STEP, micro_batch_tokens=2048),
        hub=HubSection(address="tcp://127.0.0.1:0", heartbeat_s=0.2),
        actor=ActorSection(max_inflight_groups=ENGINE_GROUPS_PER_STEP),
        metrics=MetricsSection(tensorboard=False),
    )


def _between_steps_s(run: OffbeatRun) -> float:
    steps = run.of_kind(StepRow)
    return steps[-1].time - steps[0].time


def _tokens(run: OffbeatRun) -> float:
    return sum(step.measured("tokens/trained") for step in run.of_kind(StepRow)[1:])


def _busy_s(run: OffbeatRun) -> tuple[float, float]:
    """Seconds that the actor sampled, and that the learner did not wait, first to last step."""
    wall_s = _between_steps_s(run)
    shares = learner_shares(run)
    return mean(actor_shares(run)["generate"]) * wall_s, (1 - shares["wait_rollouts"] - shares["publish_wait"]) * wall_s


def _engine_row(mode: str, runs: list[OffbeatRun]) -> list[str]:
    lags = [[row.policy_lag for row in run.of_kind(GroupRow) if row.policy_version > 0] for run in runs]
    return [
        mode,
        spread([_between_steps_s(run) for run in runs]),
        spread([_tokens(run) / _between_steps_s(run) for run in runs], 0),
        spread([max(_busy_s(run)) / _between_steps_s(run) for run in runs]),
        spread([mean(of_run) for of_run in lags]),
        spread([max(of_run) for of_run in lags], 0),
        spread([run.cost.cpu_s for run in runs], 0),
    ]


def _colocated_ratios(of_sync: list[OffbeatRun], of_async: list[OffbeatRun]) -> list[float]:
    """A synchronous run on the cores of both services, against the asynchronous one.

    Its tail stays as long (the longest completion is one sequence), its training takes half. It is estimated, not run.
    """
    ratios = []
    for one, other in zip(of_sync, of_async, strict=True):
        generate_s, train_s = _busy_s(one)
        ratios.append((generate_s + train_s / 2) / _between_steps_s(other))
    return ratios


def _shares_text(shares: list[dict[str, float]]) -> str:
    """Medians would not add up: means, in per cent."""
    return ", ".join(f"{name} {mean(of_run[name] for of_run in shares):.0%}" for name in shares[0])


def _actor_text(runs: list[OffbeatRun]) -> str:
    return _shares_text([{name: mean(of_actors) for name, of_actors in actor_shares(run).items()} for run in runs])


def main() -> None:
    """The parts named on the command line; both if none is."""
    prepare_environment()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parts = {"sleep": sleep, "engine": engine}
    for part in sys.argv[1:] or parts:
        parts[part]()


if __name__ == "__main__":
    main()
