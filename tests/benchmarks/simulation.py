"""Throughput and mean policy lag as `offbeat simulate` predicts them, compared with runs.

    python -m tests.benchmarks.simulation sockets OUT       # real sockets, sleeping engines; 3 minutes
    python -m tests.benchmarks.simulation quickstart OUT    # `offbeat train` on the quick start; 12 minutes a round
    python -m tests.benchmarks.simulation compare RUN... --fit RUN...    # existing runs

The first two make `--rounds` run folders for each setting in OUT, round by round; called again, they make the unfinished ones,
so they may be stopped at any time. They compare all runs, and write the figures to OUT/simulation.json.
Two of the settings (`FITTED`, or the runs after `--fit`) give the simulation its times and are marked in the table. The
simulation knows neither the bounds nor the numbers of actors of the other settings.

Runs and simulations are measured alike: all optimizer steps but the first `STEPS_LEFT_OUT`, the mean over `NUM_SEEDS`
simulations, and over the runs of a setting. The runs' spread limits the accuracy of a prediction: `±` is half their range.

`sockets` tests the simulation of leases, weights and selection: the time of every group is known, and no core is short.
`quickstart` tests it where engines, learner and their helpers share the cores of one machine.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import msgspec
import torch

from offbeat.common.processes.environment import prepare_environment
from offbeat.common.processes.shutdown import PARENT_VARIABLE
from offbeat.common.records.rows import FinalRow, GroupRow, Row, StepRow
from offbeat.common.records.writer import ROWS_FILE, MetricsWriter, read_rows
from offbeat.common.settings.config import (
    ActorSection,
    Config,
    DataSection,
    LaunchSection,
    ModelSection,
    RolloutSection,
    RunSection,
    StalenessSection,
)
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.common.settings.loading import load, resolved_toml
from offbeat.lab.simulation.predict import Source, fitted_times, simulate_batches
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.hub import ActorLink, HubThread
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.channels import Hub
from tests.benchmarks.measuring import print_table, processes, receive_from
from tests.benchmarks.sleeping_runs import (
    GROUP_SIZE,
    GROUPS_PER_ACTOR,
    GROUPS_PER_STEP,
    LAYOUT,
    START_S,
    Workload,
    act,
)
from tests.benchmarks.stand_ins import MAX_MESSAGE_BYTES, PATIENCE_S, make_dispatcher, make_publisher

STEPS_LEFT_OUT = 10
NUM_SEEDS = 5
RUN_TIMEOUT_S = 600.0
LOADS_FILE = "loads.json"


class Setting(NamedTuple):
    """One configuration of a run."""

    num_actors: int
    max_staleness: int
    num_slots: int
    """Groups in flight per actor."""

    @property
    def name(self) -> str:
        """Name of the setting in its runs' folders."""
        return f"actors-{self.num_actors}-staleness-{self.max_staleness}-slots-{self.num_slots}"


SETTINGS = {
    "sockets": [Setting(*pair, 4) for pair in ((2, 4), (4, 0), (4, 1), (4, 4), (6, 0), (6, 2), (6, 4))],
    "quickstart": [
        Setting(2, 0, 4),
        *(Setting(1, bound, 16) for bound in (0, 1, 4)),
        *(Setting(2, bound, 16) for bound in (0, 1, 2, 4, 8)),
        *(Setting(3, bound, 16) for bound in (0, 2, 4, 8)),
    ],
}
FITTED = {
    "sockets": [Setting(4, 4, 4), Setting(4, 0, 4)],
    # These two differ: training alone and beside busy actors, actors with few groups and with many.
    "quickstart": [Setting(2, 4, 16), Setting(2, 0, 4)],
}


# Runs whose engines and trainer sleep

WORKLOAD = Workload(0.5, 1.0)
SOCKET_STEPS = 60


class SocketLearner:
    """The learner's loop with a sleep in place of the trainer. It writes a run folder like `learner.service`."""

    def __init__(self, hub: Hub, setting: Setting, folder: Path, metrics: MetricsWriter) -> None:
        self._hub = hub
        self._num_actors = setting.num_actors
        self._metrics = metrics
        self._train_s = WORKLOAD.train_s
        self._log = RolloutLog(
            folder / "log", run_id="run", fsync="off", segment_bytes=1 << 26, retain_bytes=1 << 30, min_free_bytes=0
        )
        self._publisher = make_publisher(
            LAYOUT, num_actors=setting.num_actors, max_staleness=setting.max_staleness, record=self._record
        )
        self._dispatcher: Dispatcher = make_dispatcher(
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS_PER_STEP,
            num_steps=SOCKET_STEPS,
            max_staleness=setting.max_staleness,
            layout=LAYOUT,
            log=self._log,
            record=self._record,
            on_join=self._publisher.joined,
            on_weights=self._publisher.handle,
        )
        self._hub_thread = HubThread(hub, self._dispatcher)

    def run(self) -> None:
        """Run all steps and write the final row."""
        self._dispatcher.begin()
        self._hub_thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while len(self._dispatcher.members()) < self._num_actors:
            assert time.monotonic() < deadline, self._dispatcher.waiting_for()
            time.sleep(0.005)
        self._publisher.start(ActorLink(self._dispatcher, self._hub_thread, PATIENCE_S))
        self._publish(0)
        for policy_version in range(1, SOCKET_STEPS + 1):
            self._step(policy_version)
        self._publisher.close()
        self._dispatcher.stop("finished")
        self._hub.wake()
        self._dispatcher.wait_left(PATIENCE_S)
        self._hub_thread.close()
        self._log.close()
        ledger = self._dispatcher.counts()
        self._metrics.write(
            FinalRow(policy_version=SOCKET_STEPS, wall_s=0.0, ledger=ledger, outcome="finished", detail="no model was trained")
        )

    def _step(self, policy_version: int) -> None:
        started = time.monotonic()
        groups = self._dispatcher.take_batch(PATIENCE_S)
        assert groups is not None, self._dispatcher.waiting_for()
        waited_s = time.monotonic() - started
        time.sleep(self._train_s)
        self._dispatcher.finish_batch(groups, policy_version)
        self._hub.wake()
        self._publish(policy_version)
        step_s = time.monotonic() - started
        times = {"time/step_s": step_s, "time/wait_rollouts_s": waited_s}
        self._record(StepRow(policy_version=policy_version, metrics=times))

    def _publish(self, policy_version: int) -> None:
        with self._publisher.writing() as buffer:
            buffer.flat.fill_(policy_version)
            self._publisher.publish(policy_version)
            self._dispatcher.publish(policy_version)
        self._hub.wake()

    def _record(self, row: Row) -> None:
        self._metrics.write(row)


def make_socket_run(folder: Path, setting: Setting) -> None:
    """Make a run of `SOCKET_STEPS` steps in this folder."""
    config = Config(
        run=RunSection(dir=str(folder)),
        model=ModelSection(path="sleeping"),
        data=DataSection(train_data="nothing"),
        rollout=RolloutSection(group_size=GROUP_SIZE),
        staleness=StalenessSection(max_staleness=setting.max_staleness),
        train=TrainSection(num_steps=SOCKET_STEPS, groups_per_step=GROUPS_PER_STEP),
        actor=ActorSection(max_inflight_groups=setting.num_slots),
        launch=LaunchSection(num_actors=setting.num_actors),
    )
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(resolved_toml(config))
    with (
        processes(act, setting.num_actors) as connections,
        Hub("tcp://127.0.0.1:0", max_message_bytes=MAX_MESSAGE_BYTES) as hub,
        MetricsWriter(folder) as metrics,
    ):
        for connection in connections:
            receive_from(connection, START_S)
        learner = SocketLearner(hub, setting, folder, metrics)
        for index, connection in enumerate(connections):
            connection.send((hub.address, f"actor-{index}", WORKLOAD.sigma))
        learner.run()
        for connection in connections:
            receive_from(connection, START_S)


# The quick start


def make_quickstart_run(folder: Path, setting: Setting) -> None:
    """Run `offbeat train` in this folder, with its output in the folder `logs` beside it."""
    settings = [
        f"launch.num_actors={setting.num_actors}",
        f"staleness.max_staleness={setting.max_staleness}",
        f"actor.max_inflight_groups={setting.num_slots}",
    ]
    command = [sys.executable, "-m", "offbeat.deploy.cli.main", "train", *settings, f'run.dir="{folder}"']
    log = folder.parent / "logs" / f"{folder.name}.log"
    log.parent.mkdir(exist_ok=True)
    # The command and its services end with this process.
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    with log.open("wb") as stream:
        subprocess.run(command, env=environment, stdout=stream, stderr=stream, timeout=RUN_TIMEOUT_S, check=True)


# Comparison


class RunFigures(NamedTuple):
    """Measured or predicted figures of a run after the first steps."""

    groups_per_s: float
    mean_lag: float
    learner_waits: float


Figure = Callable[[RunFigures], float]
FIGURES: dict[str, Figure] = {
    "groups/s": lambda outcome: outcome.groups_per_s,
    "mean lag": lambda outcome: outcome.mean_lag,
}
"""The figures that predictions are compared by."""


class Comparison(NamedTuple):
    """The runs of a setting and their prediction."""

    setting: Setting
    is_fitted: bool
    runs: list[RunFigures]
    predicted: RunFigures
    loads: list[float]
    """Load averages (1 minute) of the machine before and after each run that recorded them."""

    def measured(self, figure: Figure) -> float:
        """Return the mean of a figure over the runs."""
        return mean(figure(outcome) for outcome in self.runs)

    def half_range(self, figure: Figure) -> float:
        """Return half the range of a figure over the runs."""
        values = [figure(outcome) for outcome in self.runs]
        return (max(values) - min(values)) / 2


def measure(run: Path) -> RunFigures:
    """Return the figures of a run from its rows."""
    rows = list(read_rows(run / ROWS_FILE))
    steps = [row for row in rows if isinstance(row, StepRow)]
    seconds = steps[-1].time - steps[STEPS_LEFT_OUT - 1].time
    groups = [row for row in rows if isinstance(row, GroupRow) and row.outcome == "trained"]
    lags = [row.policy_lag for row in groups if row.policy_version >= STEPS_LEFT_OUT]
    waited_s = sum(row.measured("time/wait_rollouts_s") for row in steps[STEPS_LEFT_OUT:])
    return RunFigures(len(lags) / seconds, mean(lags), waited_s / seconds)


def predict(config: Config, source: Source) -> RunFigures:
    """Return the mean figures of `NUM_SEEDS` simulations of a run's config."""
    outcomes = []
    for seed in range(NUM_SEEDS):
        batches = simulate_batches(config, source, num_actors=config.launch.num_actors, seconds=math.inf, seed=seed)
        num_out = STEPS_LEFT_OUT // (config.train.steps_per_batch * config.train.epochs_per_batch)
        first, steady = batches[num_out - 1], batches[num_out:]
        seconds = steady[-1].ended_at - first.ended_at
        lags = sum((Counter(batch.lags) for batch in steady), Counter())
        mean_lag = sum(lag * count for lag, count in lags.items()) / lags.total()
        waits = sum(batch.waited_s for batch in steady) / seconds
        outcomes.append(RunFigures(lags.total() / seconds, mean_lag, waits))
    return RunFigures(*(mean(values) for values in zip(*outcomes, strict=True)))


def compare(runs: Sequence[Path], fitted: Sequence[Path], cores: int | None, out: Path | None) -> None:
    """Print the errors of the predictions, and write the comparisons to `out`."""
    source = fitted_times(load(fitted[0] / "config.toml"), fitted, cores)
    runs_of: dict[Setting, list[Path]] = {}
    configs: dict[Setting, Config] = {}
    for run in runs:
        config = load(run / "config.toml")
        setting = Setting(config.launch.num_actors, config.staleness.max_staleness, config.actor.max_inflight_groups)
        configs[setting] = config
        runs_of.setdefault(setting, []).append(run)
    comparisons = [
        Comparison(
            setting,
            not set(fitted).isdisjoint(of_setting),
            [measure(run) for run in of_setting],
            predict(configs[setting], source),
            [average for run in of_setting for average in _load_averages(run)],
        )
        for setting, of_setting in runs_of.items()
    ]
    print_table(
        f"Predicted / measured; the simulation's times are from the runs marked *: {source.text}",
        ("actors", "slots", "max_staleness", "groups/s", "", "mean lag", "", "learner waits", "runs", "load"),
        [_row(comparison) for comparison in comparisons],
    )
    unseen = [comparison for comparison in comparisons if not comparison.is_fitted]
    for name, figure in FIGURES.items():
        errors = [error for one in unseen if (error := _error(figure(one.predicted), one.measured(figure))) is not None]
        if errors:
            num_near = sum(abs(error) < 0.1 for error in errors)
            average, worst = mean(map(abs, errors)), max(errors, key=abs)
            print(
                f"{name}, settings not fitted: {num_near} of {len(errors)} within 10%, mean {average:.1%}, worst {worst:+.1%}"
            )
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(comparisons), indent=2))


def _load_averages(run: Path) -> list[float]:
    file = run / LOADS_FILE
    return json.loads(file.read_text()) if file.exists() else []


def _row(one: Comparison) -> list[str]:
    setting = one.setting
    cells = [f"{setting.num_actors}{'*' if one.is_fitted else ''}", str(setting.num_slots), str(setting.max_staleness)]
    for figure in FIGURES.values():
        predicted, measured = figure(one.predicted), one.measured(figure)
        error = _error(predicted, measured)
        spread = f" ± {one.half_range(figure):.2f}" if len(one.runs) > 1 else ""
        cells += [f"{predicted:.2f} / {measured:.2f}{spread}", "" if error is None else f"{error:+.1%}"]
    waits = mean(outcome.learner_waits for outcome in one.runs)
    cells += [f"{one.predicted.learner_waits:.0%} / {waits:.0%}", str(len(one.runs))]
    return [*cells, f"{max(one.loads):.1f}" if one.loads else ""]


def _error(predicted: float, measured: float) -> float | None:
    """Return the relative error; None if both values are 0."""
    if not measured:
        return None if not predicted else math.inf
    return predicted / measured - 1


# The parts


def make_runs(part: str, out: Path, num_rounds: int) -> None:
    """Make the unfinished runs of a part, then compare all runs.

    A round has every setting once, so that changes in the machine's load affect all settings alike.
    """
    make = {"sockets": make_socket_run, "quickstart": make_quickstart_run}[part]
    out.mkdir(parents=True, exist_ok=True)
    folders = {
        (index, setting): out / f"{setting.name}-round-{index}" for index in range(num_rounds) for setting in SETTINGS[part]
    }
    for (_, setting), folder in folders.items():
        assert part == "quickstart" or setting.num_slots == GROUPS_PER_ACTOR, "sleeping actors have so many slots"
        if _is_finished(folder):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        before = os.getloadavg()[0]
        make(folder, setting)
        (folder / LOADS_FILE).write_text(json.dumps([before, os.getloadavg()[0]]))
        print(f"{folder.name}: {measure(folder)}", flush=True)
    # Sleeping services do not compete for cores.
    cores = 0 if part == "sockets" else None
    fitted = [folder for (_, setting), folder in folders.items() if setting in FITTED[part]]
    compare(list(folders.values()), fitted, cores, out / "simulation.json")


def _is_finished(run: Path) -> bool:
    if not (run / ROWS_FILE).exists():
        return False
    return any(isinstance(row, FinalRow) and row.outcome == "finished" for row in read_rows(run / ROWS_FILE))


def main() -> None:
    """Run the part that the command line names."""
    prepare_environment()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name in SETTINGS:
        part = parts.add_parser(name)
        part.add_argument("out", type=Path)
        part.add_argument("--rounds", type=int, default=1, help="runs of each setting")
    part = parts.add_parser("compare")
    part.add_argument("runs", type=Path, nargs="+")
    part.add_argument("--fit", type=Path, nargs="+", required=True)
    part.add_argument("--cores", type=int, help="that the runs' services shared; 0: none")
    part.add_argument("--out", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    if arguments.part == "compare":
        compare(arguments.runs, arguments.fit, arguments.cores, arguments.out)
    else:
        make_runs(arguments.part, arguments.out.resolve(), arguments.rounds)


if __name__ == "__main__":
    main()
