"""The numbers that a learner exports to Prometheus at /metrics: one table, from which docs and dashboard are made."""

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily

from offbeat.common.records.exported import Exported, Family, Values, family, one
from offbeat.common.records.rows import StepRow
from offbeat.protocols.messages import StatusReport


class OfStatus(NamedTuple):
    """A number of the status report."""

    exported: Exported
    values: Callable[[StatusReport], Values]


def _states(report: StatusReport) -> Values:
    states = [member.state for member in report.members]
    return {state: states.count(state) for state in dict.fromkeys(states)}


FROM_STATUS: tuple[OfStatus, ...] = (
    OfStatus(Exported("offbeat_policy_version", "Completed optimizer steps."), lambda report: one(report.policy_version)),
    OfStatus(
        Exported("offbeat_target_version", "Optimizer steps to make (train.num_steps)."), lambda report: one(report.num_steps)
    ),
    OfStatus(
        Exported("offbeat_published_version", "Newest policy version that was sent to actors; -1 before the first."),
        lambda report: one(report.published_version),
    ),
    OfStatus(Exported("offbeat_uptime_seconds", "Age of the learner's process."), lambda report: one(report.uptime_s)),
    OfStatus(
        Exported("offbeat_activity_seconds", "Time since the training loop began its current activity."),
        lambda report: one(report.doing_s),
    ),
    OfStatus(Exported("offbeat_actors", "Actors by state.", "state"), _states),
    OfStatus(
        Exported("offbeat_actors_wanted", "Actors that the run should have (scale.actors); 0 once it is over."),
        lambda report: one(report.actors_wanted),
    ),
    OfStatus(
        Exported("offbeat_actor_tokens_per_second", "Completion tokens that an actor generates in a second.", "actor"),
        lambda report: {member.name: member.tokens_per_s for member in report.members},
    ),
    OfStatus(
        Exported("offbeat_actor_leases", "Leases that an actor works on.", "actor"),
        lambda report: {member.name: member.num_leases for member in report.members},
    ),
    OfStatus(
        Exported("offbeat_actor_policy_lag", "Optimizer steps between an actor's weights and the learner's.", "actor"),
        lambda report: {
            member.name: max(0, report.policy_version - member.policy_version)
            for member in report.members
            if member.policy_version >= 0
        },
    ),
    OfStatus(
        Exported("offbeat_leases_total", "Leases of the run that were granted, and of these by outcome.", "state"),
        # Those in flight are `offbeat_groups_generating` and `offbeat_groups_ready`, which also fall.
        lambda report: {state: number for state, number in report.ledger.items() if state != "in flight"},
    ),
    OfStatus(Exported("offbeat_groups_ready", "Groups that wait to be trained on."), lambda report: one(report.num_ready)),
    OfStatus(Exported("offbeat_groups_generating", "Leases that actors work on."), lambda report: one(report.num_generating)),
    OfStatus(
        Exported("offbeat_epoch", "Passes over the data, including the completed share of the current one."),
        lambda report: one(report.epoch + report.epoch_position),
    ),
    OfStatus(Exported("offbeat_log_bytes", "Size of the rollout log."), lambda report: one(report.log_bytes)),
    OfStatus(
        Exported("offbeat_health_rules", "Health rules that hold now (docs/health.md)."),
        lambda report: one(len(report.vitals.health)),
    ),
    OfStatus(
        Exported("offbeat_problems", "Problems that an operator should look at, such as a full log or excluded actors."),
        lambda report: one(len(report.problems)),
    ),
    OfStatus(
        Exported("offbeat_refused_messages_total", "Messages from actors that were refused."),
        lambda report: one(sum(report.rejected.values())),
    ),
)

FROM_STEP: Mapping[Exported, str] = {
    Exported("offbeat_reward_mean", "Mean reward of the newest step's completions."): "reward/mean",
    Exported("offbeat_reward_std", "Standard deviation of these rewards."): "reward/std",
    Exported("offbeat_policy_lag_mean", "Mean policy lag of the newest step, in optimizer steps."): "lag/mean",
    Exported("offbeat_policy_lag_max", "Largest policy lag of the newest step, in optimizer steps."): "lag/max",
    Exported("offbeat_policy_lag_bound", "staleness.max_staleness in force."): "staleness/bound",
    Exported("offbeat_completion_tokens_mean", "Mean completion length of the newest step."): "length/mean",
    Exported("offbeat_completions_cut_ratio", "Share of completions that were cut off."): "length/cut",
    Exported("offbeat_trained_tokens", "Completion tokens of the newest step."): "tokens/trained",
    Exported("offbeat_clipped_ratio", "Share of tokens whose gradient the objective clipped."): "clip/fraction",
    Exported("offbeat_log_ratio_std", "Standard deviation of the log sequence ratio, in nats."): "ratio/log_std",
    Exported("offbeat_effective_samples_ratio", "Effective sample size per completion."): "ess/sequence",
    Exported("offbeat_kl_behavior_nats", "Estimate of KL(behavior || policy) per token."): "kl/behavior_policy_k3",
    Exported("offbeat_entropy_nats", "Mean entropy of the next token."): "entropy/mean",
    Exported("offbeat_gradient_norm", "Norm of the gradient before it is clipped."): "loss/grad_norm",
    Exported("offbeat_step_seconds", "Wall time of the newest step, waiting included."): "time/step_s",
    Exported("offbeat_wait_rollouts_seconds", "Time of the newest step spent waiting for rollouts."): "time/wait_rollouts_s",
    Exported("offbeat_held_back_seconds", "Time of the newest step in which staleness kept actors idle."): "time/held_back_s",
    Exported("offbeat_actor_spare_ratio", "Share of the lease slots that held no lease."): "actors/spare",
    Exported("offbeat_actor_hours_total", "Time of all actors together, in hours."): "actors/hours",
    Exported("offbeat_train_seconds", "Time of the newest step spent training."): "time/train_s",
    Exported("offbeat_mfu_ratio", "Model FLOPs utilization of the learner while it trained."): "compute/mfu",
}
"""The numbers of the newest optimizer step, each with its name in `metrics.jsonl`."""

BUILD = Exported("offbeat_build_info", "1, with the id of the run and the version of the learner's program.", "run, version")
EXPORTED: tuple[Exported, ...] = (BUILD, *(number.exported for number in FROM_STATUS), *FROM_STEP)


def families(report: StatusReport, step: StepRow | None) -> list[Family]:
    """Return all numbers that are known; `step` is the newest one."""
    build = GaugeMetricFamily(BUILD.name, BUILD.meaning, labels=BUILD.label.split(", "))
    build.add_metric([report.run_id, importlib.metadata.version("offbeat")], 1)
    found: list[Family] = [build, *(family(number.exported, number.values(report)) for number in FROM_STATUS)]
    if step is not None:
        known = ((exported, step.number(metric)) for exported, metric in FROM_STEP.items())
        found += [family(exported, one(value)) for exported, value in known if value is not None]
    return found
