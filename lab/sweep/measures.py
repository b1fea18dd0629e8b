"""The measures that a sweep compares: a run's history as a few numbers and two curves.

A run's clock starts when its first batch of rollouts is there, and stands still during a restart. The time that services take
to start depends on the machine, and would be the larger part of a short run.
"""

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby

from offbeat.common.records.rows import StepRow
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.lab.drift import ended_leases
from offbeat.lab.history import RunHistory, sum_seconds
from offbeat.lab.sweep.estimates import Curve
from offbeat.learner.diagnostics.length_bias import OutcomeSummary, bias_report

NUM_FINAL_STEPS = 10
"""Number of last steps that a run's final reward is averaged over."""


@dataclass(frozen=True)
class RunMeasures:
    """The numbers of one run; None for a number that its rows do not tell."""

    final_reward: float | None
    """Mean of `reward/mean` over the last `NUM_FINAL_STEPS` steps."""
    held_out_reward: float | None
    """Reward of the newest evaluation."""
    num_steps: int
    num_groups: int
    """Groups trained on; a group counts once, however many epochs its batch is trained for."""
    train_s: float
    """Seconds on the run's clock."""
    tokens_per_s: float | None
    """Completion tokens trained on per second of `train_s`."""
    groups_per_s: float | None
    learner_idle_share: float | None
    """Share of `train_s` in which the learner waited for rollouts."""
    actor_shares: dict[str, float]
    """Shares of the actors' main-loop time by kind of work, all actors together."""
    lag_mean: float | None
    """Mean policy lag of the trained groups in their last step, in optimizer steps."""
    lag_max: int | None
    kl_behavior_policy: float | None
    """`kl/behavior_policy_k3`, mean over steps, in nats per token."""
    clip_fraction: float | None
    """Mean of `clip/fraction` over steps."""
    log_ratio_std: float | None
    """`ratio/log_std`, mean over steps."""
    generated_length: float | None
    """Mean completion length of the generated groups, in tokens."""
    trained_length: float | None
    bias_alarm: str | None
    """The bias found, in a sentence (`learner.diagnostics.length_bias`)."""
    dropped_share: float | None
    """Share of the generated groups."""
    dropped: dict[str, int]
    """Generated groups that were dropped, by reason."""


@dataclass(frozen=True)
class RunCurves:
    """The reward of a run at the end of each step."""

    by_groups: Curve
    """Mean reward of each step, over the groups trained on by its end."""
    by_seconds: Curve
    """Mean reward of each step, over seconds on the run's clock."""


def final_reward(history: RunHistory) -> float | None:
    """Return the mean reward of the last `NUM_FINAL_STEPS` steps; None before the first."""
    return _mean(history, "reward/mean", NUM_FINAL_STEPS)


def measure(history: RunHistory, train: TrainSection) -> RunMeasures:
    """Return the numbers of a run, finished or not."""
    train_s, num_groups = sum(_seconds(history, train)), sum(_groups(history, train))
    num_tokens = sum(row.number("tokens/trained") or 0 for row in history.steps) / train.epochs_per_batch
    waited_s = sum(_wait_s(row) for row, is_first in _steps(history, train) if not is_first)
    actor_s = sum_seconds(history.actors.values())
    lags, held_out = history.groups_by_lag, history.held_out_rewards
    bias = bias_report(ended_leases(history))
    parts = {part.name: part for part in bias.parts}
    dropped = history.groups_by_drop_reason
    return RunMeasures(
        final_reward=final_reward(history),
        held_out_reward=held_out[max(held_out)] if held_out else None,
        num_steps=len(history.steps),
        num_groups=round(num_groups),
        train_s=train_s,
        tokens_per_s=num_tokens / train_s if train_s else None,
        groups_per_s=num_groups / train_s if train_s else None,
        learner_idle_share=waited_s / train_s if train_s else None,
        actor_shares={work: seconds / sum(actor_s.values()) for work, seconds in actor_s.items() if seconds > 0},
        lag_mean=sum(lag * count for lag, count in lags.items()) / sum(lags.values()) if lags else None,
        lag_max=max(lags, default=None),
        kl_behavior_policy=_mean(history, "kl/behavior_policy_k3"),
        clip_fraction=_mean(history, "clip/fraction"),
        log_ratio_std=_mean(history, "ratio/log_std"),
        generated_length=_length(parts["generated"]),
        trained_length=_length(parts["trained"]),
        bias_alarm=bias.alarm,
        dropped_share=sum(dropped.values()) / len(history.groups) if history.groups else None,
        dropped=dropped,
    )


def reward_curves(history: RunHistory, train: TrainSection) -> RunCurves:
    """Return the reward of each step that has one, over the groups and the seconds by its end."""
    groups, seconds = list(accumulate(_groups(history, train))), list(accumulate(_seconds(history, train)))
    known = [
        (groups[index], seconds[index], reward)
        for index, row in enumerate(history.steps)
        if (reward := row.number("reward/mean")) is not None
    ]
    rewards = [reward for _, _, reward in known]
    return RunCurves(Curve([count for count, _, _ in known], rewards), Curve([second for _, second, _ in known], rewards))


def numbers_of(measures: RunMeasures) -> dict[str, float]:
    """Return the run's known numbers by name; the actors' shares of time are named `actor_WORK_share`."""
    every: dict[str, float] = {name: value for name, value in asdict(measures).items() if isinstance(value, int | float)}
    return every | {f"actor_{work}_share": share for work, share in measures.actor_shares.items()}


def _steps(history: RunHistory, train: TrainSection) -> Iterator[tuple[StepRow, bool]]:
    """Yield each step's row, with True in the first batch of a learner process, which waits for services to start."""
    starts = [event.time for event in history.events if event.event == "run_started"]
    batch_steps = train.steps_per_batch * train.epochs_per_batch
    for _, of_process in groupby(history.steps, lambda row: sum(start <= row.time for start in starts)):
        for index, row in enumerate(of_process):
            yield row, index < batch_steps


def _seconds(history: RunHistory, train: TrainSection) -> Iterator[float]:
    """Yield the seconds of each step on the run's clock."""
    for row, is_first in _steps(history, train):
        step_s = row.number("time/step_s") or 0.0
        yield max(0.0, step_s - _wait_s(row) if is_first else step_s)


def _wait_s(row: StepRow) -> float:
    return row.number("time/wait_rollouts_s") or 0.0


def _groups(history: RunHistory, train: TrainSection) -> Iterator[float]:
    """Yield the groups that each step trained on; each of a batch's epochs counts an equal part of them."""
    for row in history.steps:
        yield sum(row.groups_by_lag.values()) / train.epochs_per_batch


def _mean(history: RunHistory, name: str, num_last: int = 0) -> float | None:
    """Return the mean of a metric over the last `num_last` steps, 0 for all; None where no step has it."""
    values = [value for row in history.steps[-num_last:] if (value := row.number(name)) is not None]
    return statistics.fmean(values) if values else None


def _length(part: OutcomeSummary) -> float | None:
    return part.length.mean if part.length else None
