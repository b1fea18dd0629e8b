"""The settings of a run: one frozen struct per section of the TOML file, the same file for every service.

Reading and explaining them is `common.settings`; which of them contradict each other, `common.setting_checks`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
ImportPath = Annotated[str, Meta(pattern=r"^[\w.]+:\w+$")]
RewardName = Annotated[str, Meta(pattern=r"^(\w+|[\w.]+:\w+)$")]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every section is: immutable, and strict about unknown settings."""


class RunSection(Section, frozen=True):
    """Where the run's files go."""

    dir: str = "runs/{time}"
    """Folder for metrics, checkpoints, report and model. `{time}` becomes the start time."""
    resume: bool = False
    """Continue from the newest checkpoint in `run.dir`."""
    seed: NonNegativeInt = 0
    """Seeds the order of prompts and the learner's random state."""


class ModelSection(Section, frozen=True):
    """The policy."""

    path: str = ""
    """Folder in the Hugging Face layout (config, weights, tokenizer), or a hub name where a hub can be reached."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute type of learner and engine, and of the weights sent. Log-probs are float32 always."""
    max_length: PositiveInt = 4096
    """Longest prompt plus completion, in tokens."""


class TaskSection(Section, frozen=True):
    """Prompts and how completions are rewarded."""

    train_data: str = ""
    """A JSONL file, or the name of a Hugging Face dataset (`owner/name`, `owner/name/config`)."""
    train_split: str = "train"
    """Split of a Hugging Face dataset; ignored for a file."""
    eval_data: str = ""
    """Held-out prompts, as `train_data`. Empty: no evaluation."""
    eval_split: str = "test"
    """Split of the evaluation dataset; ignored for a file."""
    prompt_field: str = "prompt"
    """Field of a row that holds the prompt."""
    weight_field: str = ""
    """Field of a row that weighs its groups in the loss, a number of at least 0; empty: all weigh 1."""
    system_prompt: str = ""
    """Put before the prompt when the chat template is used."""
    chat_template: bool = False
    """Wrap each prompt with the tokenizer's chat template."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are an error or left out: see `long_prompts`."""
    long_prompts: Literal["error", "drop"] = "error"
    """What to do with a row whose prompt has more than `max_prompt_tokens` tokens."""
    reward: RewardName = "exact_match"
    """A built-in reward (`exact_match`, `math_answer`), or your own as `module:function`: plain or async, called with
    `(prompt: str, completion: str, row: dict)`, returns a number."""
    reward_timeout_s: PositiveFloat = 30.0
    """Time limit for the rewards of one group; past it the group counts as failed."""


class RolloutSection(Section, frozen=True):
    """How groups are sampled."""

    group_size: PositiveInt = 8
    """Completions per prompt; the group is the baseline of its own advantages."""
    max_new_tokens: PositiveInt = 1024
    """Longest completion, in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner divides its logits by the same number."""
    top_p: float = 1.0
    """Must stay 1: a truncated distribution makes the behavior log-probs those of another policy."""
    top_k: int = -1
    """Must stay -1 (all tokens), for the same reason."""
    min_p: float = 0.0
    """Must stay 0, for the same reason."""
    lease_timeout_s: PositiveFloat = 600.0
    """A lease not answered by then expires and its prompt is leased again."""
    max_lease_attempts: PositiveInt = 3
    """A prompt whose leases failed (reward errors) this often is dropped; lost actors do not count."""


class StalenessSection(Section, frozen=True):
    """How old a rollout may be when it is trained on, in optimizer steps."""

    max_staleness: NonNegativeInt = 4
    """Admission bound: no lease is granted that, trained in its turn, would lag by more. 0 is exactly synchronous training.
    Also understood as `max_off_policy_steps`."""
    staleness_policy: Literal["gate", "drop", "abort"] = "gate"
    """What becomes of a group that is late and lags by more than `max_staleness` all the same. gate: it is trained on, and
    counted. drop: it is dropped when its turn comes, and its prompt leased again. abort: that, and generation past the bound is
    cancelled."""
    hard_max_staleness: NonNegativeInt | None = None
    """Under gate: a group that lags by more when its turn comes is dropped and its prompt leased again. None: never drop."""
    lag_of: Literal["oldest_token", "token_mean", "last_segment"] = "oldest_token"
    """What the lag that `drop`, `hard_max_staleness` and the count of stragglers go by is taken of, where weights changed in
    mid-completion: the group's oldest token, the mean over its tokens, or the newest weights in its stalest completion."""
    selection: Literal["oldest_lease", "first_finished"] = "oldest_lease"
    """Which of the finished groups are trained next. first_finished favors short completions: a negative control."""
    auto: bool = False
    """Under gate: move `max_staleness` while the run goes on, by the measured drift over the noise floor: down where it is
    large, and up to `hard_max_staleness` where it is small and the bound keeps actors from work that the learner waits for."""


class RewardSection(Section, frozen=True):
    """What becomes of the rewards before advantages are taken: penalties, then normalization, then the clip."""

    overlong_buffer: NonNegativeInt | None = None
    """Completions that end within so many tokens of `rollout.max_new_tokens` are punished, linearly more the longer they are
    (DAPO's soft overlong punishment). None: the objective's own, 0 but for dapo."""
    overlong_penalty: PositiveFloat = 1.0
    """What a completion of `rollout.max_new_tokens` loses."""
    length_penalty: Annotated[str, Meta(pattern=r"^([\w.]+:\w+)?$")] = ""
    """`module:function(lengths, max_new_tokens) -> penalties`, arrays `[completions]`; they are added to the rewards."""
    norm_mean: Literal["none", "group", "batch", "running"] = "none"
    """Whose mean is subtracted: that of a reward's group, of the optimizer step's batch, or of all rewards so far."""
    norm_std: Literal["none", "group", "batch", "running"] = "none"
    """Whose standard deviation the rewards are then divided by; it need not be of those that the mean is of."""
    clip: PositiveFloat | None = None
    """Rewards are clipped to plus or minus this, after normalization. None: not at all."""


class AdvantageSection(Section, frozen=True):
    """How rewards become advantages."""

    baseline: Literal["group", "leave_one_out", "critic", "zero"] | None = None
    """What is subtracted from a reward: its group's mean, the mean of the others in its group, a learned value (with GAE), or
    nothing. None: the objective's own, group but for ppo."""
    divide_by_std: bool | None = None
    """Divide by the group's standard deviation (GRPO, GSPO). None: the objective's own, and false without a group's mean."""
    std_epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation; the papers have none."""
    std_unbiased: bool = True
    """Divide the squares by n - 1."""
    whiten: bool = False
    """Shift and scale the advantages of the step's tokens to mean 0 and variance 1, over all ranks."""
    clip: PositiveFloat | None = None
    """Advantages are clipped to plus or minus this, last of all. None: not at all."""
    gamma: Fraction = 1.0
    """Discount per token of what the critic's GAE and a KL in the reward sum up."""
    gae_lambda: Fraction = 0.95
    """GAE's trade between the critic's bias and the rewards' variance; for `baseline = "critic"`."""


class LossSection(Section, frozen=True):
    """The objective: which one, against which log-probs, and how its tokens are averaged."""

    objective: Literal["gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "sapo", "cispo", "reinforce", "ppo"] = "gspo"
    """See the README's table; settings left out (None) below take the objective's own values."""
    anchor: Literal["behavior", "proximal", "decoupled"] = "behavior"
    """Denominator of the importance ratio: the stored engine log-probs; the learner's own, recomputed before the update; or
    those, with `correction` for what lies between the two."""
    clip_low: PositiveFloat | None = None
    """The ratio is clipped below `1 - clip_low`. GSPO's own is 0.05 against engine log-probs, where the paper's 3e-4 clips
    about 40% of all completions for numerical noise, and 3e-4 against recomputed ones."""
    clip_high: PositiveFloat | None = None
    """The ratio is clipped above `1 + clip_high`; GSPO's own is 0.05, or 4e-4 against recomputed log-probs."""
    noise_floor: str = ""
    """The file that `offbeat calibrate` wrote, for every learner process to read: clip fractions and divergences are then split
    into what the engine's numerics cause and what staleness does. Empty: they are not."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Not for sapo, cispo and reinforce: the loss of a negative advantage is capped at this many times it, where the ratio that
    the objective clips, a token's or a sequence's, is larger. None: not at all."""
    tau_positive: PositiveFloat = 1.0
    """SAPO's temperature for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """SAPO's temperature for negative advantages."""
    correction: Literal["none", "token_tis", "sequence_tis", "icepop", "sequence_mask", "geometric_mask", "opsm", "m2po"] = (
        "none"
    )
    """Weight or mask for what the ratio leaves out: `pi_old / mu` with the decoupled anchor, otherwise `pi / mu`."""
    correction_low: NonNegativeFloat | None = None
    """Lower bound of the correction's ratio. None: the correction's own."""
    correction_high: PositiveFloat | None = None
    """Upper bound of the correction's ratio; of the mean log-ratio for opsm, of the second moment for m2po. None: its own."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None = None
    """How token losses become one number. None: the objective's own."""
    aggregation_length: PositiveInt | None = None
    """The constant that seq-mean-token-sum-norm divides by. None: `rollout.max_new_tokens`."""
    entropy_coef: NonNegativeFloat = 0.0
    """Bonus for the policy's entropy, averaged as the loss is."""
    zero_variance: Literal["count", "drop"] | None = None
    """Groups whose rewards are all equal: train on them with zero advantages and count them, or drop them and lease on
    (dynamic sampling). None: the objective's own, count but for dapo."""


class KlSection(Section, frozen=True):
    """Divergence from a frozen reference policy: off unless one of the coefficients is set, and free then."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimate: `log pi/ref`, half its square, or `ref/pi - 1 - log ref/pi`."""
    loss_coef: NonNegativeFloat = 0.0
    """Weight of the KL in the loss."""
    unbiased: bool = False
    """Multiply the KL in the loss by `pi / mu`, so that its gradient is right for stale rollouts too."""
    reward_coef: NonNegativeFloat = 0.0
    """Weight of the KL taken from every token's reward."""
    target: PositiveFloat | None = None
    """The coefficient that is set adapts until the measured KL per token is this. None: it stays."""
    horizon: PositiveInt = 10_000
    """How slowly it adapts, in completions."""
    reference: str = ""
    """Model folder or hub name of the reference; empty: the initial policy."""


class CriticSection(Section, frozen=True):
    """The value head, for `advantage.baseline = "critic"`."""

    loss_coef: PositiveFloat = 0.5
    """Weight of the value loss."""
    value_clip: PositiveFloat | None = 0.2
    """Values are clipped to plus or minus this around those before the update."""


class LoraSection(Section, frozen=True):
    """Train a low-rank adapter instead of all weights; actors get the merged weights."""

    rank: NonNegativeInt = 0
    """Rank of the adapter; 0: train all weights."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by `alpha / rank`."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers that get one; empty: all but the output head."""


class TrainSection(Section, frozen=True):
    """The learner's optimization."""

    num_steps: PositiveInt = 1000
    """Optimizer steps in the run."""
    groups_per_step: PositiveInt = 32
    """Groups in one optimizer step, over all ranks and micro-batches."""
    steps_per_batch: PositiveInt = 1
    """Optimizer steps that the groups of one selection are split into."""
    epochs_per_batch: PositiveInt = 1
    """Passes over the groups of one selection, each of `steps_per_batch` steps. A group's lag is that of its last pass."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: hold, or decay to zero at `num_steps`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from zero."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's moment decays."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens in one forward/backward pass, each prompt counted once; a longer completion gets a pass of its own."""
    fp32_head: bool = False
    """Compute the output head's logits from float32 copies of states and weights, whatever `model.dtype` is."""
    zero_stage: Annotated[int, Meta(ge=0, le=3)] = 0
    """DeepSpeed ZeRO stage."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    deepspeed: dict[str, Any] = {}
    """Merged over the DeepSpeed config that these settings make."""
    checkpoint_interval: NonNegativeInt = 0
    """Optimizer steps between checkpoints; 0 saves none but the final model (and what `log.retain_mb` asks for): a learner that
    dies then trains from the first step again, on the groups in its log."""
    keep_checkpoints: PositiveInt = 2
    """Older checkpoints are deleted."""
    max_failed_leases: PositiveInt = 200
    """The run stops with an error after this many failed leases (reward errors) in a row."""
    no_actor_timeout_s: NonNegativeFloat = 0.0
    """Stop with an error after so long without any live actor; 0 waits for ever, saying so every 30 s."""


class HubSection(Section, frozen=True):
    """Where the services meet."""

    address: str = "tcp://127.0.0.1:5700"
    """The learner's address as actors reach it. Port 0 with `offbeat train`: any free port."""
    bind: str = ""
    """Address the learner binds; empty: `address`."""
    key: str = ""
    """This service's secret key file (`offbeat keygen`). Without keys the hub binds to loopback only."""
    learner_key: str = ""
    """The learner's public key file: by it actors and operators know the learner."""
    allowed_keys: str = ""
    """File of the public keys that may connect to the learner; it is read again when it changes."""
    max_actors: PositiveInt = 1024
    """More are refused."""
    heartbeat_s: PositiveFloat = 1.0
    """Seconds between an actor's heartbeats."""
    dead_after_s: PositiveFloat = 15.0
    """A peer not heard of for so long is taken for dead; its leases go to others."""
    max_message_mb: PositiveInt = 256
    """Larger messages are not received."""


class LogSection(Section, frozen=True):
    """The rollout log: what happened to every lease, and every accepted group, in `run.dir/log`."""

    enabled: bool = True
    """Without it a restarted learner has its rollouts generated again."""
    fsync: Literal["off", "second", "ack"] = "off"
    """When records are forced to disk: never (they survive the death of every process, not a power failure), at most once a
    second, or before every acknowledgement."""
    segment_mb: PositiveInt = 64
    """A segment file is closed at this size; whole segments are deleted."""
    retain_mb: PositiveInt = 1024
    """Older segments are deleted beyond this size, unless the oldest kept checkpoint needs them; where it does, the learner
    writes a checkpoint."""
    min_free_mb: PositiveInt = 64
    """With less free space on the disk no lease is granted until there is room again."""


class WeightsSection(Section, frozen=True):
    """How weights travel from learner to actors."""

    backend: Literal["auto", "gloo", "nccl", "pull"] = "auto"
    """Collective: gloo for CPU tensors, nccl for GPU tensors; auto takes nccl when the learner trains on a GPU. pull: none,
    every actor fetches each version over the hub's (encrypted) transport."""
    port: NonNegativeInt = 0
    """Port of the collective's rendezvous store on the learner's host; 0: any."""
    pull_port: NonNegativeInt = 0
    """Port of the weight server on the learner's host, from which actors pull; 0: any."""
    max_pulls: PositiveInt = 2
    """Actors that may pull at once."""
    chunk_mb: PositiveInt = 8
    """Size of one pulled chunk."""
    on_canary_mismatch: Literal["drop", "flag"] = "drop"
    """What becomes of the buffered groups that a quarantined actor sampled after its last good version."""
    bucket_mb: PositiveInt = 8
    """Size of one broadcast. On a CPU (gloo) 8 to 64 MB are within noise of each other; 64 and more suit NCCL."""
    timeout_s: PositiveFloat = 60.0
    """Deadline for each phase of an update; an actor that misses it is left out of the update, by name."""
    interval: PositiveInt = 1
    """Optimizer steps between updates."""


class ActorSection(Section, frozen=True):
    """What every actor does."""

    name: str = ""
    """Unique among live actors; empty: host name and process id."""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """auto: vLLM where it is installed."""
    engine_options: dict[str, Any] = {}
    """Passed to the engine as they are (vLLM: `EngineArgs`; transformers: `ContinuousBatchingConfig`)."""
    max_inflight_groups: Annotated[int, Meta(ge=1, le=1 << 18)] = 16
    """Groups an actor works on at once: its credit."""
    on_update: Literal["keep_kv", "recompute_kv"] = "keep_kv"
    """What becomes of running completions' KV cache at a weight update. Keeping is faster; the later tokens then attend to
    keys of the older weights, and the recorded behavior log-probs are still what was sampled from."""
    reward_workers: PositiveInt = 1
    """Processes that run a plain (not async) reward function."""
    connect_timeout_s: NonNegativeFloat = 0.0
    """Give up when the learner has not answered for so long; 0 waits for ever, saying so every 30 s."""


class EvaluationSection(Section, frozen=True):
    """Held-out prompts, generated by the same actors while training goes on."""

    interval: NonNegativeInt = 0
    """Optimizer steps between evaluations; 0: never."""
    num_prompts: PositiveInt = 64
    """The first so many rows of `task.eval_data`."""
    group_size: PositiveInt = 1
    """Completions per prompt."""
    temperature: NonNegativeFloat = 0.0
    """0: greedy."""


class MetricsSection(Section, frozen=True):
    """Where numbers go besides `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard events to `run.dir/tensorboard`."""
    wandb_project: str = ""
    """Weights & Biases project (needs the `wandb` extra); empty: off."""
    routing_interval: NonNegativeInt = 10
    """Optimizer steps between measurements of a mixture-of-experts model's routing; 0: never."""


class LaunchSection(Section, frozen=True):
    """What `offbeat train` starts on this machine."""

    num_actors: PositiveInt = 1
    """Actor processes."""
    learner_processes: PositiveInt = 1
    """Learner ranks."""
    learner_gpus: tuple[int, ...] = ()
    """GPU of each learner rank; empty: all that are visible, or the CPU."""
    actor_gpus: tuple[tuple[int, ...], ...] = ()
    """GPUs of each actor, one list per actor; empty: all that are visible, or the CPU."""
    max_restarts: NonNegativeInt = 3
    """How often a service that died is started again before the run is stopped; ten minutes of work restore the budget."""


class Config(Section, frozen=True):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    rollout: RolloutSection = RolloutSection()
    staleness: StalenessSection = StalenessSection()
    reward: RewardSection = RewardSection()
    advantage: AdvantageSection = AdvantageSection()
    loss: LossSection = LossSection()
    kl: KlSection = KlSection()
    critic: CriticSection = CriticSection()
    lora: LoraSection = LoraSection()
    train: TrainSection = TrainSection()
    hub: HubSection = HubSection()
    log: LogSection = LogSection()
    weights: WeightsSection = WeightsSection()
    actor: ActorSection = ActorSection()
    evaluation: EvaluationSection = EvaluationSection()
    metrics: MetricsSection = MetricsSection()
    launch: LaunchSection = LaunchSection()
