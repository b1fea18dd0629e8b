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
    system_prompt: str = ""
    """Put before the prompt when the chat template is used."""
    chat_template: bool = False
    """Wrap each prompt with the tokenizer's chat template."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are an error or left out: see `long_prompts`."""
    long_prompts: Literal["error", "drop"] = "error"
    """What to do with a row whose prompt has more than `max_prompt_tokens` tokens."""
    reward: ImportPath = "actor.rewards:exact_match"
    """`module:function(prompt: str, completion: str, row: dict) -> float`, plain or async."""
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
    """Admission bound: no lease is granted that, trained in its turn, would lag by more. 0 is exactly synchronous training."""
    hard_max_staleness: NonNegativeInt | None = None
    """A group that lags by more when its turn comes is dropped and its prompt leased again. None: never drop."""


class LossSection(Section, frozen=True):
    """The objective: GSPO."""

    anchor: Literal["behavior", "proximal"] = "behavior"
    """Denominator of the sequence ratio: the stored engine log-probs, or the learner's own, recomputed before the update."""
    clip_low: PositiveFloat = 0.05
    """The sequence ratio is clipped below `1 - clip_low`. The paper's 3e-4 is for log-probs of identical numerics: against
    engine log-probs it clips about 40% of all completions at lag zero, so the default is far above that noise."""
    clip_high: PositiveFloat = 0.05
    """The sequence ratio is clipped above `1 + clip_high` (paper: 4e-4, see `clip_low`)."""
    advantage_std: bool = True
    """Divide group advantages by the group's standard deviation (GRPO, GSPO); false subtracts the mean only (Dr. GRPO)."""
    zero_variance: Literal["count", "drop"] = "count"
    """Groups whose rewards are all equal: train on them with zero advantages and count them, or drop them and lease on."""


class TrainSection(Section, frozen=True):
    """The learner's optimization."""

    num_steps: PositiveInt = 1000
    """Optimizer steps in the run."""
    groups_per_step: PositiveInt = 32
    """Groups in one optimizer step, over all ranks and micro-batches."""
    steps_per_batch: PositiveInt = 1
    """Optimizer steps taken on the groups of one selection; with `loss.anchor = "proximal"` it must be at least 2."""
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
    """Most tokens, padding included, in one forward/backward pass; a longer completion gets a pass of its own."""
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
    max_inflight_groups: PositiveInt = 16
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
    loss: LossSection = LossSection()
    train: TrainSection = TrainSection()
    hub: HubSection = HubSection()
    log: LogSection = LogSection()
    weights: WeightsSection = WeightsSection()
    actor: ActorSection = ActorSection()
    evaluation: EvaluationSection = EvaluationSection()
    metrics: MetricsSection = MetricsSection()
    launch: LaunchSection = LaunchSection()
