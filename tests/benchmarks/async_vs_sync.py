"""Asynchronous compared with synchronous training: the same rollouts under `max_staleness` 4 and 0.

    python -m tests.benchmarks.async_vs_sync sleep     # generation and training are sleeps; 2.5 minutes
    python -m tests.benchmarks.async_vs_sync engine    # `offbeat train` on a tiny random model under vLLM; 3 minutes
    python -m tests.benchmarks.async_vs_sync single    # the same, also with one completion per prompt; 6 minutes

`sleep` measures the cost of leases, sockets, gate, buffer and weight updates. Everything but engine and trainer is production
code: actors in separate processes, one hub, one publisher. With B groups in a step, N groups in flight, group time X and
training time T, the ideals follow from the times measured in the same trial:

    sync       E[longest of a step's B groups] + T
    async      max(B E[X] / N, T)
    colocated  E[longest of a step's B groups] + T / 2: synchronous, all devices sample and train in turn
    divisible  (B E[X] / N + T) / 2: without a tail and without switching; no synchronous system reaches it

Here N = B: both modes have the same slots, and actors and trainer use equally many devices.

`single` compares groups of eight with the same number of groups of one, which wait for no completion but their own. Advantages
are rewards without a baseline there, so that no critic's time is in the comparison.

By Little's law E[policy lag] = L / B, where L is the mean number of groups begun and not yet trained on. The lag is
N / B + 1/2 if actors are the bottleneck (plus the time of a weight update), and `max_staleness` if the trainer is.
"""

import os
import sys
import tempfile
from pathlib import Path
from statistics import mean

import msgspec
import torch

from offbeat.common.processes.environment import prepare_environment
from offbeat.common.records.rows import GroupRow, StepRow
from offbeat.common.settings.config import (
    ActorSection,
    Config,
    DataSection,
    HubSection,
    MetricsSection,
    ModelSection,
    RolloutSection,
)
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.common.settings.loading import resolved_toml
from tests.benchmarks.measuring import (
    NUM_ROUNDS,
    OffbeatRun,
    actor_shares,
    learner_shares,
    print_table,
    processes,
    receive_from,
    run_offbeat,
    spread,
)
from tests.benchmarks.sleeping_runs import (
    GROUP_SIZE,
    GROUPS_PER_ACTOR,
    GROUPS_PER_STEP,
    NUM_ACTORS,
    NUM_STEPS,
    START_S,
    Trial,
    Workload,
    act,
    measure_sleep,
)

MAX_STALENESS = {"sync": 0, "async": 4}


WORKLOADS = (Workload(0.5, 0.5), Workload(1.0, 0.5), Workload(1.0, 1.5))


def sleep() -> None:
    """Measure all workloads in both modes and print the tables."""
    torch.set_num_threads(1)
    trials: dict[tuple[Workload, str], list[Trial]] = {}
    with processes(act, NUM_ACTORS) as connections:
        for connection in connections:
            receive_from(connection, START_S)
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
    """Return `B E[X] / N`, the seconds of sampling per step."""
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
ENGINE_HEADER = ("", "seconds", "tokens/s", "busier/step", "mean lag", "max lag", "CPU s, start-up included")


NUM_COMPLETIONS = ENGINE_GROUPS_PER_STEP * GROUP_SIZE
SINGLE = (
    "rollout.group_size=1",
    f"train.groups_per_step={NUM_COMPLETIONS}",
    f"actor.max_inflight_groups={NUM_COMPLETIONS}",
    "advantage.baseline=zero",
)
"""Settings for completions that are each alone; a step has as many as with groups, and as many are in flight."""


def engine() -> None:
    """Run `offbeat train` in both modes and print the tables."""
    runs = _engine_runs({mode: (f"staleness.max_staleness={bound}",) for mode, bound in MAX_STALENESS.items()})
    print_table(
        f"offbeat train, tiny random model, vLLM, one actor, {ENGINE_STEPS} steps of {ENGINE_GROUPS_PER_STEP} groups of "
        f"{GROUP_SIZE}, first to last step, {NUM_ROUNDS} interleaved rounds: median (min–max)",
        ENGINE_HEADER,
        [_engine_row(mode, of_mode) for mode, of_mode in runs.items()],
    )
    print(
        f"\nsync/async: {spread(_time_ratios(*runs.values()))}; colocated/async: {spread(_colocated_ratios(*runs.values()))}; "
        f"divisible/async: {spread([sum(_busy_s(run)) / 2 / _between_steps_s(run) for run in runs['async']])}"
    )
    shares = [
        [mode, _shares_text([learner_shares(run) for run in of_mode]), _actor_text(of_mode)] for mode, of_mode in runs.items()
    ]
    print_table("Shares of each service's time, first to last step", ("", "learner", "actor"), shares)


def single() -> None:
    """Run `offbeat train` with groups and with one completion per prompt, in both modes, and print the table."""
    variants = {
        f"{mode}, {name}": (f"staleness.max_staleness={bound}", *settings)
        for mode, bound in MAX_STALENESS.items()
        for name, settings in (("groups", ("advantage.baseline=zero",)), ("single", SINGLE))
    }
    runs = _engine_runs(variants)
    print_table(
        f"offbeat train, tiny random model, vLLM, one actor, {ENGINE_STEPS} steps of {NUM_COMPLETIONS} completions, in groups "
        f"of {GROUP_SIZE} or alone, first to last step, {NUM_ROUNDS} interleaved rounds: median (min–max)",
        ENGINE_HEADER,
        [_engine_row(name, of_variant) for name, of_variant in runs.items()],
    )
    ratios = {mode: _time_ratios(runs[f"{mode}, groups"], runs[f"{mode}, single"]) for mode in MAX_STALENESS}
    print("\ngroups/single: " + "; ".join(f"{mode} {spread(of_mode)}" for mode, of_mode in ratios.items()))


def _engine_runs(variants: dict[str, tuple[str, ...]]) -> dict[str, list[OffbeatRun]]:
    """Run `offbeat train` with the settings of each variant, in turns."""
    from transformers.utils.logging import disable_progress_bar

    from offbeat.deploy.local.quickstart.tiny_models import make_tiny_model

    disable_progress_bar()
    runs: dict[str, list[OffbeatRun]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory(prefix="offbeat-benchmark-") as name:
        folder = Path(name)
        # With 40 characters and an end token, completions end after about 44 tokens; one in 300 reaches the limit.
        make_tiny_model(folder / "model", alphabet="0123456789abcdefghijklmnopqrstuvwxyz+-=>")
        prompts = [{"prompt": f"{index:03d}+{index % 7}>", "answer": "none"} for index in range(64)]
        (folder / "train.jsonl").write_bytes(b"".join(msgspec.json.encode(prompt) + b"\n" for prompt in prompts))
        (folder / "run.toml").write_text(resolved_toml(_engine_config(folder)))
        for _ in range(NUM_ROUNDS):
            for variant, of_variant in variants.items():
                runs[variant].append(run_offbeat(str(folder / "run.toml"), *of_variant, timeout_s=ENGINE_TIMEOUT_S))
    return runs


def _engine_config(folder: Path) -> Config:
    # Every reward is 0, so the policy does not change and both modes sample from one distribution of lengths.
    return Config(
        model=ModelSection(path=str(folder / "model"), dtype="float32", max_length=272),
        data=DataSection(train_data=str(folder / "train.jsonl"), max_prompt_tokens=16),
        rollout=RolloutSection(group_size=GROUP_SIZE, max_new_tokens=256),
        # Micro-batches are small, because padding would dominate one of all 64 completions.
        train=TrainSection(num_steps=ENGINE_STEPS, groups_per_step=ENGINE_GROUPS_PER_STEP, micro_batch_tokens=2048),
        hub=HubSection(address="tcp://127.0.0.1:0"),
        actor=ActorSection(max_inflight_groups=ENGINE_GROUPS_PER_STEP),
        metrics=MetricsSection(tensorboard=False),
    )


def _time_ratios(some: list[OffbeatRun], others: list[OffbeatRun]) -> list[float]:
    return [_between_steps_s(one) / _between_steps_s(other) for one, other in zip(some, others, strict=True)]


def _between_steps_s(run: OffbeatRun) -> float:
    steps = run.of_kind(StepRow)
    return steps[-1].time - steps[0].time


def _tokens(run: OffbeatRun) -> float:
    return sum(step.measured("tokens/trained") for step in run.of_kind(StepRow)[1:])


def _busy_s(run: OffbeatRun) -> tuple[float, float]:
    """Return the seconds that the actor sampled and that the learner did not wait, first to last step."""
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
    """Estimate the time of a synchronous run on the cores of both services, relative to the asynchronous run.

    The tail stays as long, because the longest completion is one sequence; training takes half the time.
    """
    ratios = []
    for one, other in zip(of_sync, of_async, strict=True):
        generate_s, train_s = _busy_s(one)
        ratios.append((generate_s + train_s / 2) / _between_steps_s(other))
    return ratios


def _shares_text(shares: list[dict[str, float]]) -> str:
    """Return the mean shares in percent; medians would not add up."""
    return ", ".join(f"{name} {mean(of_run[name] for of_run in shares):.0%}" for name in shares[0])


def _actor_text(runs: list[OffbeatRun]) -> str:
    return _shares_text([{name: mean(of_actors) for name, of_actors in actor_shares(run).items()} for run in runs])


def main() -> None:
    """Run the parts named on the command line, or all."""
    prepare_environment()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parts = {"sleep": sleep, "engine": engine, "single": single}
    for part in sys.argv[1:] or parts:
        parts[part]()


if __name__ == "__main__":
    main()
