"""The settings by which the policy is trained: rewards, advantages, loss, KL, critic, adapter and optimizer.

The text below each setting is what `offbeat explain` prints.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from offbeat.common.settings.objectives import Aggregation, Baseline
from offbeat.common.settings.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
)


class RewardSection(Section, frozen=True):
    """Changes to rewards before advantages are computed: penalties, then normalization, then clipping."""

    overlong_buffer: NonNegativeInt | None = None
    """Length of the zone before `rollout.max_new_tokens`, in tokens, in which a completion's reward falls linearly with its
    length (DAPO's soft overlong punishment). 0: no penalty. none: the objective's default, 20% of `rollout.max_new_tokens` for
    dapo and 0 for the others."""
    overlong_penalty: PositiveFloat = 1.0
    """Penalty subtracted from the reward of a completion of `rollout.max_new_tokens` tokens."""
    length_penalty: Annotated[str, Meta(pattern=r"^([\w.]+:\w+)?$")] = ""
    """Your own penalty, as `module:function`. It is called with `(lengths, max_new_tokens)` and returns the numbers to add to
    the rewards; both arrays have the shape `[completions]`. Empty: no such penalty."""
    norm_mean: Literal["none", "group", "batch", "running"] = "none"
    """Mean subtracted from each reward: over its group, over the optimizer step's batch, or over all rewards so far."""
    norm_std: Literal["none", "group", "batch", "running"] = "none"
    """Standard deviation by which each reward is then divided: over its group, over the optimizer step's batch, or over all
    rewards so far. It may differ from `reward.norm_mean`."""
    clip: PositiveFloat | None = None
    """Bound on the absolute value of a reward after normalization. none: rewards are not clipped."""


class AdvantageSection(Section, frozen=True):
    """Computation of advantages from rewards."""

    function: Annotated[str, Meta(pattern=r"^([\w.]+:\w+)?$")] = ""
    """Your own advantages, as `module:function`, in place of baseline and standard deviation. It takes a step's rewards, an
    array `[groups, group_size]`, and returns such an array (docs/own_code.md). Empty: no such function."""
    baseline: Baseline | None = None
    """Number subtracted from a reward. group: the mean of its group. leave_one_out: the mean of the other completions in its
    group. length_weighted: the mean of its group, in which a completion counts by its number of tokens. critic: a learned
    value, with generalized advantage estimation (GAE). zero: nothing. none: the objective's default, critic for ppo and group
    for the others."""
    turns: Literal["sum", "to_go", "branch"] = "sum"
    """Use of the rewards that an environment gives to turns (`chat.reward`). sum: an episode has one advantage, computed from
    the sum of its rewards. to_go: each turn has its own advantage, computed from the rewards given after the turn was requested
    and compared with the same turn of the group's other episodes. branch: as to_go, but computed from the episode's rewards
    minus those given to other sequences of the episode, such as another attempt or another agent."""
    divide_by_std: bool | None = None
    """Divide by the standard deviation of the group's rewards, as GRPO and GSPO do. none: the objective's default with the
    group baseline (false for dr_grpo and ppo, true for the others), and false with any other baseline and for
    any `advantage.turns` but sum."""
    whiten: bool = False
    """Shift and scale the advantages of all tokens of an optimizer step, over all ranks, to mean 0 and variance 1."""
    clip: PositiveFloat | None = None
    """Bound on the absolute value of an advantage, applied last. none: advantages are not clipped."""
    gamma: Fraction = 1.0
    """Discount per token, from 0 to 1, in the critic's GAE and in the sum of `kl.reward_coef` terms."""
    gae_lambda: Fraction | Literal["by_length"] = 0.95
    """Lambda of GAE, from 0 (relies on the critic) to 1 (relies on the rewards). by_length: `1 - 1 / (1.5 n)` for a completion
    of n tokens, as in VAPO and SAO. Used by `advantage.baseline = "critic"`."""


class LossSection(Section, frozen=True):
    """The objective, its importance ratio, and the average over tokens."""

    objective: str = "gspo"
    """Training objective, with its parameters in parentheses if they differ from the paper's, as in `sapo(1, 1.05)`;
    docs/objectives.md describes each. Every setting below whose value is none takes its default from the objective."""
    function: Annotated[str, Meta(pattern=r"^([\w.]+:\w+)?$")] = ""
    """Your own token loss, as `module:function` (docs/own_code.md), in place of the objective's, which still decides the
    defaults of other settings. It takes no clip settings and no temperatures. Empty: the objective's own loss."""
    anchor: Literal["behavior", "group", "interpolated", "proximal", "decoupled"] = "behavior"
    """Denominator of the importance ratio. behavior: the log-probs that the engine sampled with. proximal: the learner's own
    log-probs, recomputed before the update. decoupled: as proximal, while `loss.correction` covers the difference between
    proximal and behavior log-probs. interpolated: as decoupled, but the proximal log-probs are estimated from the behavior
    log-probs, the current ones and each token's lag, without another forward pass (A-3PO). group: the likelihood per token of
    the group's completions when they were sampled, averaged over the group with the likelihoods themselves as weights (GEPO);
    for gspo, gspo_token and luspo."""
    clip_low: PositiveFloat | None = None
    """Distance below 1 at which the importance ratio is clipped, at `1 - clip_low`. For dppo_tv and dppo_kl the largest
    divergence of a token that its negative advantage pushes down. none: the objective's default. For gspo it is 3e-4 against
    recomputed log-probs; against behavior log-probs it is 0.05, and `loss.clip_by` narrows it."""
    clip_high: PositiveFloat | None = None
    """Distance above 1 at which the importance ratio is clipped, at `1 + clip_high`. For dppo_tv and dppo_kl the largest
    divergence of a token that its positive advantage pushes up. none: the objective's default. For gspo it is 4e-4 against
    recomputed log-probs; against behavior log-probs it is the same as for `clip_low`."""
    clip_by: Literal["own_length", "run"] | None = None
    """Length that determines the clip range of a sequence ratio. own_length: each completion's own number of tokens n (for an
    episode, over all of its turns). The range is 0.3 / n, but at most `clip_low` and `clip_high`, and at least two standard
    deviations of the engine's noise beyond the mean of that noise. The noise is that of `loss.noise_floor`, or 0.035 nats per
    token without it. run: one range for all completions. none: own_length for gspo, gspo_token and luspo against behavior
    log-probs, unless you set `clip_low` or `clip_high`, and run otherwise."""
    routing_replay: Literal["off", "recomputed", "sampled"] = "off"
    """Experts that a mixture-of-experts model uses while the policy is trained; the current logits weight them. off: the
    experts that the routers choose at that moment. recomputed: the experts that they chose when the log-probs of `loss.anchor`
    (proximal or decoupled) were recomputed before the update (R2). sampled: the experts that the engine chose, sent by the
    actors (R3); this needs `actor.engine` to be transformers, or vLLM on a GPU."""
    noise_floor: str = ""
    """Path of the calibration file that `offbeat calibrate` wrote; every learner process reads it. Clip fractions and
    divergences are then split into a part that comes from the engine's numerical noise and a part that comes from staleness,
    and `loss.clip_by = "own_length"` uses that noise. Empty: they are not split."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Cap on the loss where the advantage is negative, as a multiple of the advantage's absolute value. It applies where the
    ratio that the objective clips exceeds this number. For gspo, gspo_token, luspo, grpo, dr_grpo, dapo, ppo and ce_gppo. none:
    no cap."""
    correction: str = "none"
    """Weights and masks applied to the loss for the mismatch that the importance ratio does not cover: `pi_old / mu` with the
    decoupled and the interpolated anchor, `pi / mu` otherwise. Values: none; a built-in correction, with bounds if they differ
    from its defaults, as in `token_tis(0.5, 2)` (docs/objectives.md); your own function, as `module:function`
    (docs/own_code.md); or several of these joined by ` + `, whose weights are multiplied."""
    normalize_correction: bool = False
    """Divide the weights of `loss.correction` by their mean over the optimizer step, before its masks, so that they average 1
    (self-normalized importance sampling). Only with the decoupled anchor."""
    aggregation: Aggregation | None = None
    """Average that turns token losses into one number. none: the objective's default."""
    aggregation_length: PositiveInt | None = None
    """Constant by which seq-mean-token-sum-norm divides, in tokens. none: `rollout.max_new_tokens`."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, averaged over tokens as the loss is. 0: no bonus."""
    zero_variance: Literal["count", "drop"] | None = None
    """Treatment of groups whose rewards are all equal. count: train on them, with zero advantages, and count them. drop: drop
    them and lease further prompts (dynamic sampling). none: the objective's default, drop for dapo and count for the others."""


class KlSection(Section, frozen=True):
    """Divergence from a frozen reference policy. While both coefficients are 0 it is not computed and costs nothing."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the KL divergence per token. k1: `log pi/ref`. k2: half of its square. k3: `ref/pi - 1 - log ref/pi`."""
    loss_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence in the loss. 0: off."""
    unbiased: bool = False
    """Multiply the KL divergence in the loss by `pi / mu`, which makes its gradient correct for stale rollouts too."""
    reward_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence that is subtracted from the reward of each token. 0: off."""
    target: PositiveFloat | None = None
    """KL divergence per token toward which the coefficient in use is adapted. none: the coefficient stays constant."""
    reference: str = ""
    """Model folder or Hugging Face Hub name of the reference policy. Empty: the initial policy."""


class CriticSection(Section, frozen=True):
    """The critic, used by `advantage.baseline = "critic"`: a value head, and the network below it."""

    trunk: Literal["shared", "own"] = "shared"
    """Network below the value head. shared: the policy, whose loss then contains the value loss. own: a second network, which
    starts as the model at `model.path` and has its own optimizer. It takes as much memory as a policy whose weights are all
    trained."""
    updates_per_step: PositiveInt = 1
    """Number of optimizer steps that the critic's own trunk takes in each optimizer step of the policy, on the same
    completions."""
    learning_rate_factor: PositiveFloat = 5.0
    """Constant learning rate of the critic's own trunk, as a multiple of `train.learning_rate`."""
    alone_until: NonNegativeInt = 0
    """Number of optimizer steps at the start in which only the critic's own trunk learns: the policy's learning rate is 0."""
    freeze_attention: bool = False
    """Train all layers of the critic's own trunk except the attention layers."""
    target_lambda: Fraction | None = None
    """Lambda of GAE in the critic's targets; 1: the completion's reward is the target. none: `advantage.gae_lambda`."""
    loss_coef: PositiveFloat = 0.5
    """Weight of the value loss in the loss of a shared trunk."""
    value_clip: PositiveFloat | None = 0.2
    """Maximum distance of a value from its value before the update; beyond it the value is clipped. none: values are not
    clipped."""


class LoraSection(Section, frozen=True):
    """Training of a low-rank adapter instead of all weights. Actors receive the merged weights."""

    rank: NonNegativeInt = 0
    """Rank of the adapter. 0: no adapter, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapter: its output is multiplied by `alpha / rank`."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter. Empty: all linear layers but the output head."""


class TrainSection(Section, frozen=True):
    """The learner's optimization and checkpoints."""

    num_steps: PositiveInt = 1000
    """Number of optimizer steps in the run."""
    groups_per_step: Annotated[int, Meta(ge=1, le=1 << 16)] = 32
    """Number of groups in one optimizer step, over all ranks and micro-batches."""
    steps_per_batch: PositiveInt = 1
    """Number of optimizer steps that the groups of one selection are split into."""
    epochs_per_batch: PositiveInt = 1
    """Number of passes over the groups of one selection, each of `train.steps_per_batch` steps. A group's lag is the one at its
    last pass."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a linear or cosine decay to 0 at `train.num_steps`."""
    warmup_steps: NonNegativeInt = 0
    """Number of optimizer steps over which the learning rate rises linearly from 0. 0: no warm-up."""
    on_policy_ess: PositiveFraction | None = None
    """Effective sample size of steps at lag 0, as `ess/sequence_truncated` shows it: 1 if engine and learner agree. If a step
    has a smaller one, its learning rate is scaled by the square root of their ratio (VCPO). none: it is not scaled."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW."""
    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments, each at least 0 and below 1."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it."""
    micro_batch_tokens: PositiveInt = 16384
    """Maximum number of tokens in one forward and backward pass, each prompt counted once. A completion that exceeds it gets a
    pass of its own."""
    fp32_head: bool = False
    """Compute the logits in float32, from float32 copies of the output head's input and weights, whatever `model.dtype` is."""
    sequence_parallel_size: PositiveInt = 1
    """Number of neighboring learner processes that share each forward and backward pass, for sequences too long for one GPU
    (Ulysses). Each process holds its part of a pass's tokens, and computes attention for its part of the heads. The number must
    divide `launch.learner_processes` and the model's number of heads, and either divide the number of key-value heads or be a
    multiple of it."""
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 0
    """DeepSpeed ZeRO stage, from 0 to 3."""
    activation_checkpointing: bool | Literal["offload"] = False
    """Recompute activations in the backward pass: less memory for about a third more computation. offload: also keep the inputs
    of the layers, from which they are recomputed, in the host's memory."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the decoder layers with torch.compile. This requires a GPU, bfloat16, `train.zero_stage` below 3,
    `train.sequence_parallel_size = 1` and a model without experts. auto: compile if these hold and `loss.anchor` is behavior or
    interpolated; the other anchors need equal log-probs with and without gradients."""
    deepspeed: dict[str, Any] = msgspec.field(default_factory=dict)
    """DeepSpeed options in addition to those derived from the settings above."""
    checkpoint_interval: NonNegativeInt = 100
    """Number of optimizer steps between checkpoints; a run that ends or is stopped writes one too. Each takes up to 16 bytes of
    disk for each trained parameter, and `offbeat check` names the sum. 0: only the final model is saved, and checkpoints that
    `log.retain_mb` needs; a learner that dies then trains again from the first step, on the groups in its log."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints to keep; older ones are deleted, except the one of the version with the highest evaluation."""

    @property
    def batch_steps(self) -> int:
        """Optimizer steps on the groups of one selection."""
        return self.steps_per_batch * self.epochs_per_batch
