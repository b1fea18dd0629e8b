"""The numbers that a learner exports to Prometheus at /metrics: one table, from which docs and dashboard are made."""

import importlib.metadata
from collections.abc import Mapping

from prometheus_client.core import GaugeMetricFamily

from offbeat.common.records.exported import Exported, Family, Values, families_of, family, one
from offbeat.common.records.rows import StepRow
from offbeat.protocols.messages import StatusReport

FROM_STATUS = (
    Exported("offbeat_policy_version", "Completed optimizer steps."),
    Exported("offbeat_target_version", "Optimizer steps to make (train.num_steps)."),
    Exported("offbeat_published_version", "Newest policy version that was sent to actors; -1 before the first."),
    Exported("offbeat_uptime_seconds", "Age of the learner's process."),
    Exported("offbeat_activity_seconds", "Time since the training loop began its current activity."),
    Exported("offbeat_actors", "Actors by state.", "state"),
    Exported("offbeat_actors_wanted", "Actors that the run should have (scale.actors); 0 once it is over."),
    Exported("offbeat_actor_tokens_per_second", "Completion tokens that an actor generates in a second.", "actor"),
    Exported("offbeat_actor_leases", "Leases that an actor works on.", "actor"),
    Exported("offbeat_actor_policy_lag", "Optimizer steps between an actor's weights and the learner's.", "actor"),
    Exported("offbeat_leases_total", "Leases of the run that were granted, and of these by outcome.", "state"),
    Exported("offbeat_groups_ready", "Groups that wait to be trained on."),
    Exported("offbeat_groups_generating", "Leases that actors work on."),
    Exported("offbeat_epoch", "Passes over the data, including the completed share of the current one."),
    Exported("offbeat_log_bytes", "Size of the rollout log."),
    Exported("offbeat_health_rules", "Health rules that hold now (docs/health.md)."),
    Exported("offbeat_problems", "Problems that an operator should look at, such as a full log or excluded actors."),
    Exported("offbeat_refused_messages_total", "Messages from actors that were refused."),
)


def _values(report: StatusReport) -> dict[str, Values]:
    """Return the values of `FROM_STATUS` by name."""
    states = [member.state for member in report.members]
    with_weights = [member for member in report.members if member.policy_version >= 0]
    return {
        "offbeat_policy_version": one(report.policy_version),
        "offbeat_target_version": one(report.num_steps),
        "offbeat_published_version": one(report.published_version),
        "offbeat_uptime_seconds": one(report.uptime_s),
        "offbeat_activity_seconds": one(report.doing_s),
        "offbeat_actors": {state: states.count(state) for state in dict.fromkeys(states)},
        "offbeat_actors_wanted": one(report.actors_wanted),
        "offbeat_actor_tokens_per_second": {member.name: member.tokens_per_s for member in report.members},
        "offbeat_actor_leases": {member.name: member.num_leases for member in report.members},
        "offbeat_actor_policy_lag": {
            member.name: max(0, report.policy_version - member.policy_version) for member in with_weights
        },
        # Those in flight are `offbeat_groups_generating` and `offbeat_groups_ready`, which also fall.
        "offbeat_leases_total": {state: number for state, number in report.ledger.items() if state != "in flight"},
        "offbeat_groups_ready": one(report.num_ready),
        "offbeat_groups_generating": one(report.num_generating),
        "offbeat_epoch": one(report.epoch + report.epoch_position),
        "offbeat_log_bytes": one(report.log_bytes),
        "offbeat_health_rules": one(len(report.vitals.health)),
        "offbeat_problems": one(len(report.problems)),
        "offbeat_refused_messages_total": one(sum(report.rejected.values())),
    }


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
EXPORTED: tuple[Exported, ...] = (BUILD, *FROM_STATUS, *FROM_STEP)


def families(report: StatusReport, step: StepRow | None) -> list[Family]:
    """Return all numbers that are known; `step` is the newest one."""
    build = GaugeMetricFamily(BUILD.name, BUILD.meaning, labels=BUILD.label.split(", "))
    build.add_metric([report.run_id, importlib.metadata.version("offbeat")], 1)
    found: list[Family] = [build, *families_of(FROM_STATUS, _values(report))]
    if step is not None:
        known = ((exported, step.number(metric)) for exported, metric in FROM_STEP.items())
        found += [family(exported, one(value)) for exported, value in known if value is not None]
    return found
