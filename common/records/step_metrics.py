"""The metrics of step and routing rows: every name with its unit and meaning.

The code that writes a metric and the code that reads it use a name of these tables. In a name, `<lag>` stands for a bucket of
policy lags: `0`, `1`, `2`, `3-4`, `5-8` or `9+`, written `3_4`, `5_8` and `9_up` in routing rows; `<turn>` stands for a bucket
of an episode's turns: `1`, `2`, `3-4`, `5-8` or `9+`; `<part>` stands for a named part of the reward, `<task>` for a task.

In the meanings mu is the behavior policy, pi_old the proximal one, pi the current one and s a completion's sequence ratio
`exp(mean over its tokens of log pi/anchor)`. A *mean per completion* is over completions with loss tokens.
"""

import re
from functools import cache
from typing import NamedTuple

from offbeat.protocols.fields import PART_NAME


class Metric(NamedTuple):
    """One number of a row."""

    name: str
    unit: str
    meaning: str
    condition: str = ""
    """The condition under which a row has the metric; empty if every row has it."""


_CLIPPING = "the objective has a clip band"
_PROXIMAL = 'loss.anchor is "interpolated", "proximal" or "decoupled"'
_CORRECTED = 'loss.correction is not "none"'
_FLOOR = "loss.noise_floor is set"
_REPLAYED = 'loss.routing_replay is not "off"'
_IN_EPISODES = "task.environment is set"
_IN_PARTS = "the reward function returns named parts"
_IN_BUCKET = "the step trained on completions in that bucket"
_IN_TURNS = "an episode of the step has several turns, and one has turns in that bucket"
_KL_K3 = "as kl/behavior_policy_k3"

BY_LAG = {
    "ratio/log_mean": "nats",
    "ratio/log_std": "nats",
    "ratio/m2": "nats²",
    "clip/fraction": "share",
    "clip/noise": "share",
    "clip/drift": "share",
    "ess/sequence": "share",
    "ess/token": "share",
    "kl/behavior_policy_k1": "nats per token",
    "kl/behavior_policy_k3": "nats per token",
    "kl/behavior_proximal_k3": "nats per token",
    "kl/proximal_policy_k3": "nats per token",
    "correction/masked": "share",
    "correction/truncated": "share",
}
"""The metrics that each bucket of lags has too, with their units."""

STEP_METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "reward", "Mean over the completions, before any scaling or penalty."),
    Metric("reward/std", "reward", "Standard deviation over the completions."),
    Metric("reward/zero_variance_groups", "groups", "Groups whose completions all have the same reward."),
    Metric("reward_part/<part>", "reward", "Mean of a named part over the completions, before its weight.", _IN_PARTS),
    Metric("reward_by_task/<task>", "reward", "reward/mean of the completions of a task.", "data.task_field is set"),
    Metric("curriculum/<task>", "share", "Share of a task's prompts that is leased.", "data.curriculum is set"),
    Metric("lag/mean", "optimizer steps", "Mean policy lag of the groups."),
    Metric("lag/max", "optimizer steps", "Largest policy lag of a group."),
    Metric("lag/counts", "groups", "Groups by policy lag, as a mapping."),
    Metric("length/mean", "tokens", "Mean completion length."),
    Metric("length/min", "tokens", "Shortest completion."),
    Metric("length/p50", "tokens", "Median completion length."),
    Metric("length/p95", "tokens", "95th percentile of the completion lengths."),
    Metric("length/max", "tokens", "Longest completion."),
    Metric("length/cut", "share", "Completions cut off at rollout.max_new_tokens; the others stopped by themselves."),
    Metric("group/seconds_mean", "s", "Mean time from a group's start to its last completion's end, environment included."),
    Metric("group/seconds_max", "s", "Longest such time of a group."),
    Metric("length/context", "tokens", "Mean number of tokens that an environment added to an episode.", _IN_EPISODES),
    Metric("turns/mean", "turns", "Mean number of the model's turns in an episode.", _IN_EPISODES),
    Metric("turns/max", "turns", "Most turns of an episode.", _IN_EPISODES),
    Metric("environment/seconds_mean", "s", "Mean time that an episode spent outside of the model's turns.", _IN_EPISODES),
    Metric("environment/seconds_max", "s", "Longest such time of an episode.", _IN_EPISODES),
    Metric("tokens/trained", "tokens", "Completion tokens trained on."),
    Metric("tokens/prompt", "tokens", "Prompt tokens, once for each completion."),
    Metric("by_lag/<lag>/reward_mean", "reward", "reward/mean of the completions in the bucket.", _IN_BUCKET),
    Metric("by_lag/<lag>/length_mean", "tokens", "length/mean of the completions in the bucket.", _IN_BUCKET),
    Metric("loss/policy", "", "Policy loss of the step, aggregated as loss.aggregation says, without KL, entropy and critic."),
    Metric("ratio/log_mean", "nats", "Mean of log s."),
    Metric("ratio/log_std", "nats", "Standard deviation of log s."),
    Metric("ratio/log_min", "nats", "Smallest log s."),
    Metric("ratio/log_max", "nats", "Largest log s."),
    Metric("ratio/log_p05", "nats", "5th percentile of log s."),
    Metric("ratio/log_p50", "nats", "Median of log s."),
    Metric("ratio/log_p95", "nats", "95th percentile of log s."),
    Metric("ratio/first", "", "Mean of |s - 1|: the engine's numerics alone, as nothing is stale yet.", "first step"),
    Metric("ratio/token_log_abs_max", "nats", "Largest |log pi/anchor| of a token."),
    Metric("ratio/m2", "nats²", "Mean per token of (log pi/mu)², which M2PO bounds (https://arxiv.org/abs/2510.01161)."),
    Metric("clip/fraction", "share", "Mean per completion of the share of its tokens whose gradient a clip made zero."),
    Metric("clip/positive_above", "share", "Tokens with advantage > 0 and ratio above the band (clipped).", _CLIPPING),
    Metric("clip/positive_below", "share", "Tokens with advantage > 0 and ratio below the band (not clipped).", _CLIPPING),
    Metric("clip/negative_above", "share", "Tokens with advantage < 0 and ratio above the band (not clipped).", _CLIPPING),
    Metric("clip/negative_below", "share", "Tokens with advantage < 0 and ratio below the band (clipped).", _CLIPPING),
    Metric("clip_tokens/fraction", "share", "clip/fraction, as a share of all tokens of the step."),
    Metric("clip_tokens/positive_above", "share", "clip/positive_above, as a share of all tokens of the step.", _CLIPPING),
    Metric("clip_tokens/positive_below", "share", "clip/positive_below, as a share of all tokens of the step.", _CLIPPING),
    Metric("clip_tokens/negative_above", "share", "clip/negative_above, as a share of all tokens of the step.", _CLIPPING),
    Metric("clip_tokens/negative_below", "share", "clip/negative_below, as a share of all tokens of the step.", _CLIPPING),
    Metric("ess/sequence", "share", "Kish's effective sample size per completion, of the products of pi/mu over its tokens."),
    Metric("ess/sequence_truncated", "share", "ess/sequence, weights cut off at 8 (VCPO, https://arxiv.org/abs/2602.17616)."),
    Metric("ess/token", "share", "Effective sample size per token, of pi/mu. Stays near 1 long after training is unsafe."),
    Metric("kl/behavior_policy_k1", "nats per token", "Estimate of KL(mu || pi): mean of log mu/pi."),
    Metric("kl/behavior_policy_k3", "nats per token", "Estimate of KL(mu || pi): mean of pi/mu - 1 - log pi/mu, at least 0."),
    Metric("kl/behavior_proximal_k1", "nats per token", "Estimate of KL(mu || pi_old), as kl/behavior_policy_k1.", _PROXIMAL),
    Metric("kl/behavior_proximal_k3", "nats per token", f"Estimate of KL(mu || pi_old), {_KL_K3}.", _PROXIMAL),
    Metric("kl/proximal_policy_k1", "nats per token", "Estimate of KL(pi_old || pi), as kl/behavior_policy_k1.", _PROXIMAL),
    Metric("kl/proximal_policy_k3", "nats per token", f"Estimate of KL(pi_old || pi), {_KL_K3}.", _PROXIMAL),
    Metric("broken/not_finite", "completions", "Left out of the step, because a token's log-prob is nan or infinite."),
    Metric("broken/ratio", "completions", "Left out of the step, because a token's pi/anchor is more than e^20."),
    Metric("broken/leases", "completions", "Completions that were left out, by lease, as a mapping.", "some were left out"),
    Metric("correction/masked", "share", "Tokens that the off-policy correction gave weight 0.", _CORRECTED),
    Metric("correction/truncated", "share", "Tokens whose weight the correction cut to a bound.", _CORRECTED),
    Metric("correction/log_mean", "nats", "Mean per token of the log weight, before masking and truncation.", _CORRECTED),
    Metric("correction/weight_mean", "", "Mean weight per token; masked tokens count as 0.", _CORRECTED),
    Metric("kl/noise", "nats per token", "kl/behavior_policy_k3 that engine noise alone makes.", _FLOOR),
    Metric("kl/drift", "nats per token", "kl/behavior_policy_k3 less kl/noise.", _FLOOR),
    Metric("clip/noise", "share", "clip/fraction that engine noise alone is expected to make.", f"{_FLOOR}, and {_CLIPPING}"),
    Metric("clip/drift", "share", "clip/fraction less clip/noise; negative by chance.", f"{_FLOOR}, and {_CLIPPING}"),
    Metric("by_lag/<lag>/count", "completions", "Completions whose policy lag is in the bucket.", _IN_BUCKET),
    *(
        Metric(f"by_lag/<lag>/{name.replace('/', '_')}", unit, f"{name} of the completions in the bucket.", _IN_BUCKET)
        for name, unit in BY_LAG.items()
    ),
    Metric("by_turn/<turn>/tokens", "tokens", "Completion tokens of the turns in the bucket.", _IN_TURNS),
    Metric("by_turn/<turn>/lag_mean", "optimizer steps", "Mean lag of these tokens, each by its own version.", _IN_TURNS),
    Metric("by_turn/<turn>/kl_behavior_policy_k3", "nats per token", "kl/behavior_policy_k3 of these tokens.", _IN_TURNS),
    Metric("kl/reference", "nats per token", "KL of the policy from the reference.", "kl.loss_coef or kl.reward_coef is set"),
    Metric("kl/coefficient", "", "Coefficient of that KL, which kl.target adapts.", "kl.loss_coef or kl.reward_coef is set"),
    Metric("kl/reward", "nats per token", "KL of the behavior policy from the reference.", "kl.reward_coef is set"),
    Metric("entropy/mean", "nats", "Mean over all completion tokens of the policy's entropy over the next token."),
    Metric("loss/value", "", "Mean value loss per token, before the step.", "the run has a critic"),
    Metric("loss/value_grad_norm", "", "Norm of the critic's gradient in its first step.", 'critic.trunk = "own"'),
    Metric(
        "loss/explained_variance",
        "share",
        "Share of the targets' variance over tokens that the values before the update explain: 1 - var(R - V) / var(R).",
        "the run has a critic, and the targets differ",
    ),
    Metric(
        "loss/replay_changed_slots",
        "share",
        "Replayed experts that the routers would not have chosen, where completion tokens are predicted.",
        _REPLAYED,
    ),
    Metric("loss/grad_cosine", "", "Cosine between this step's gradient and the last one's.", "not a process's first step"),
    Metric("loss/grad_norm", "", "Norm of the gradient before it is clipped."),
    Metric("loss/learning_rate", "", "Learning rate of the step, scaled where train.on_policy_ess is set."),
    Metric(
        "compute/flops",
        "FLOP",
        "Operations of the step's forward and backward passes, on all ranks, each counted once: matrix products, attention "
        "within each sequence, the head on completion tokens only, and of the experts only those used.",
    ),
    Metric("compute/recomputed", "share", "Operations repeated to save memory, plus M2PO's first pass, over compute/flops."),
    Metric("compute/peak", "FLOP/s", "Speed of the learner's devices: published for GPUs in bfloat16, else measured at start."),
    Metric("compute/mfu", "share", "Model FLOPs utilization: compute/flops over what compute/peak allows in time/train_s."),
    Metric("time/train_s", "s", "Time of forward and backward passes and the optimizer step."),
    Metric("time/prepare_s", "s", "Time of a batch's frozen log-probs and advantages, in its first step; 0 in the others."),
    Metric("time/step_s", "s", "Wall time of the whole batch, waiting included, divided by its steps."),
    Metric("time/wait_rollouts_s", "s", "Time the learner waited for the batch, divided by its steps."),
    Metric("time/held_back_s", "s", "Time in which staleness alone kept leases from an actor with room, divided by the steps."),
    Metric("time/publish_wait_s", "s", "Time the learner waited for the last publish to end, divided by the steps."),
    Metric("time/snapshot_s", "s", "Time of copying and announcing the weights, divided by the steps."),
    Metric("staleness/bound", "optimizer steps", "staleness.max_staleness as it is at the end of the batch."),
    Metric("staleness/lease_limit", "leases", "Largest number of open leases (`staleness.target`), at the end of the batch."),
    Metric("staleness/over_bound", "groups", "Groups of the step whose lag, by staleness.lag_of, is above the bound."),
    Metric("buffer/ready", "groups", "Groups that wait in the learner's buffer at the end of the batch."),
    Metric("actors/number", "actors", "Actors that take leases at the end of the batch."),
    Metric("actors/spare", "share", "Lease slots without a lease, averaged over the time since the last batch."),
    Metric("actors/hours", "h", "Time of all actors together since the beginning of the run."),
    Metric("buffer/in_flight", "groups", "Groups that are being generated at the end of the batch."),
)
"""The metrics of a step row, nearly in the row's order."""

_COMPARISONS = (
    ("overlap", "share", "Mean over tokens and layers of the share of chosen experts that are the same"),
    ("changed_slots", "share", "1 - overlap"),
    ("router_mismatch", "share", "Token-layer pairs with a different set of experts"),
    ("token_any", "share", "Tokens with a different set of experts in at least one layer"),
    ("routers_per_token", "layers", "Mean number of layers in which a token has a different set of experts"),
)
_AGAINST = (
    ("update", "the version sent before", "a version of the learner was kept before this one"),
    ("lag_<lag>", "kept versions that are older by that many optimizer steps", "such a version is kept"),
    ("engine", "an actor's engine under the same version", "the row is about an actor"),
)
_LEARNER_ROW = "the row is about the learner"

ROUTING_METRICS: tuple[Metric, ...] = (
    Metric("routing/load_max_over_mean", "", "Busiest expert's tokens over the mean; mean over layers.", _LEARNER_ROW),
    Metric("routing/load_entropy", "", "Entropy of the experts' load, 1 when even; mean over layers.", _LEARNER_ROW),
    Metric("routing/margin_p5", "", "5th percentile of the router's logit gap between chosen and not.", _LEARNER_ROW),
    Metric("routing/margin_p25", "", "25th percentile of that gap.", _LEARNER_ROW),
    Metric("routing/margin_p50", "", "Median of that gap.", _LEARNER_ROW),
    Metric("routing/update_steps", "optimizer steps", "Steps between this version and the one sent before.", _AGAINST[0][2]),
    *(
        Metric(f"routing/{prefix}_{name}", unit, f"{meaning}, against {other}.", condition)
        for prefix, other, condition in _AGAINST
        for name, unit, meaning in _COMPARISONS
    ),
)

TASK_REWARDS = "reward_by_task/"
"""Begin of the names of the rewards of tasks."""
TASK_SHARES = "curriculum/"
"""Begin of the names of the shares of tasks."""
_STEP_NAMES = {metric.name: metric for metric in STEP_METRICS}
_REWARD_PART = re.compile(f"(?<=^reward_part/){PART_NAME}")
_TASK = re.compile(f"^(reward_by_task|curriculum)/{PART_NAME}")
_BUCKET = re.compile(r"^by_(lag|turn)/\d{1,9}(?:-\d{1,9}|\+)?(?=/)")


@cache
def step_metric(name: str) -> Metric | None:
    """Return what the table says of a step row's metric, at whatever lag, turn or part; None for an unknown name."""
    name = _BUCKET.sub(r"by_\1/<\1>", name)
    return _STEP_NAMES.get(_TASK.sub(r"\1/<task>", _REWARD_PART.sub("<part>", name)))
