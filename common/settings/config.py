"""The settings of a run: one frozen struct per section of the TOML file, the same file for every service.

The text below each setting is what `offbeat explain` prints. `common.settings.loading` reads and explains the settings;
`common.settings.checks` refuses contradictions between them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from offbeat.common.settings.learning_sections import (
    AdvantageSection,
    CriticSection,
    KlSection,
    LoraSection,
    LossSection,
    RewardSection,
    TrainSection,
)
from offbeat.common.settings.section import (
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    RewardName,
    Section,
)
from offbeat.protocols.text import NAME_PATTERN


class RunSection(Section, frozen=True):
    """The run's folder, its seed, and the limits at which it gives up."""

    dir: str = "runs/{time}"
    """Folder for the run's metrics, checkpoints, report and model. `{time}` is replaced by the start time."""
    resume: bool | Literal["auto"] = False
    """Continue the run in `run.dir` from its newest checkpoint and its rollout log. auto: continue it if there is one,
    otherwise start it; for a learner that a scheduler restarts."""
    mirror: str = ""
    """Folder to which a thread of the learner copies closed log segments, checkpoints, metrics, settings and the model: object
    storage such as `s3://bucket/run` (with the package s3fs), or any other address that fsspec knows. A learner with
    `run.resume` and an empty folder downloads the newest checkpoint, the best one, and the log from it. Empty: no mirror."""
    grace_s: PositiveFloat | None = None
    """Time that the learner's machine leaves between SIGTERM and SIGKILL, in seconds. If it is set, SIGTERM pauses the run: the
    learner finishes its step, writes a checkpoint if there is time, lets the actors wait for the next learner, and exits with
    status 143. none: SIGTERM ends the run like Ctrl-C."""
    max_failed_leases: PositiveInt = 200
    """Number of failed leases (reward errors) in a row after which the run stops with an error."""
    no_actor_timeout_s: NonNegativeFloat = 0.0
    """Time without any live actor after which the run stops with an error, in seconds. 0: wait forever, with a message every 30
    s."""
    no_group_timeout_s: NonNegativeFloat | None = None
    """Time with connected actors but no usable group after which the run stops with an error that gives the reason, in seconds.
    0: wait forever. none: 6 times `rollout.lease_timeout_s`."""
    seed: NonNegativeInt = 0
    """Seed for the order of prompts and for the learner's random numbers."""


class ModelSection(Section, frozen=True):
    """The policy model."""

    path: str = ""
    """Model folder in the Hugging Face layout (config, weights, tokenizer), a Hugging Face Hub name, or a GGUF file or a folder
    with one, which is unpacked once to a folder in the user's cache. Required."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the computation in learner and engine, and of the weights sent to actors. Log-probs are always float32."""
    max_length: PositiveInt = 4096
    """Maximum length of a prompt plus its completion, in tokens."""


class DataSection(Section, frozen=True):
    """The prompts: the data that they are in, and how each row becomes one."""

    train_data: str = ""
    """Training prompts: a file (.jsonl, .json, .parquet, .csv, .tsv, .arrow), a folder of such files, the name of a Hugging
    Face dataset (`owner/name` or `owner/name/config`), your own function as `module:function`, which returns the rows of a
    split (docs/own_code.md), generators of reasoning-gym, such as `reasoning-gym:chain_sum?size=2000` (docs/data.md), or the
    rows that the environment brings along, as `task-environment:train?size=2000` (docs/environments.md). Required."""
    train_split: str = "train"
    """Split of the training folder or dataset; it is passed to a function. Ignored for a file."""
    appended_data: Literal["refuse", "allow"] = "refuse"
    """Treatment of rows that were added to the end of the training data before a run is resumed. refuse: the learner does not
    start. allow: they join at the next pass over the data, if the earlier rows are unchanged."""
    eval_data: str | dict[str, str] = ""
    """Held-out prompts for evaluation, given as for `data.train_data`, or a table of named sets. Empty: no evaluation."""
    eval_split: str = "test"
    """Split of the evaluation folder or dataset; it is passed to a function. Ignored for a file."""
    prompt_field: str = "prompt"
    """Name of the field that holds the prompt in each row: text, a list of messages, or a request of OpenAI's Responses API,
    such as NeMo Gym's `responses_create_params`. The last two need `data.chat_template`."""
    task_field: str = ""
    """Name of the field that holds the name of a row's task, in data of several tasks. Steps then have the mean reward of each,
    `reward_by_task/NAME`. Empty: no statistics per task."""
    curriculum: Annotated[str, Meta(pattern=r"^([\w.]+:\w+)?$")] = ""
    """Your own curriculum as `module:function`. After each batch it gets the results of each task (`data.task_field`) so far,
    and returns a weight for each: docs/data.md. Empty: every prompt is leased in each pass over the data."""
    image_field: str = ""
    """Name of the field that holds the images of a row's prompt: a path, or a list of paths, relative to the data's folder. The
    prompt has `<image>` in place of each image: docs/images.md. Empty: prompts are text only."""
    weight_field: str = ""
    """Name of the field that holds the weight of a row's groups in the loss, a number of at least 0. Empty: every group weighs
    1."""
    system_prompt: str = ""
    """System message placed before each prompt. It needs `data.chat_template`. Empty: no system message."""
    system_prompt_field: str = ""
    """Name of the field that holds a row's own system message, used where it is not empty. Empty: rows have none."""
    chat_template: bool = False
    """Format each prompt with the tokenizer's chat template."""
    template_arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of the chat template, for example `{enable_thinking = false}`."""
    template_arguments_field: str = ""
    """Name of the field that holds a row's own arguments of the chat template, an object, which replace those of
    `data.template_arguments`. Empty: rows have none."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum length of a prompt, in tokens. `data.long_prompts` decides what happens to longer ones."""
    long_prompts: Literal["error", "drop"] = "error"
    """Treatment of rows whose prompt exceeds `data.max_prompt_tokens`. error: the learner refuses to start. drop: the rows are
    left out."""


class TaskSection(Section, frozen=True):
    """The reward for completions, or the environment that gives it."""

    environment: Annotated[str, Meta(pattern=r"^([\w.]+:[\w./@-]+)?$")] = ""
    """Your own environment as `module:function`: an async function that plays one episode of several turns and returns its
    reward; or one of a framework, such as `verifiers:reverse-text`: docs/environments.md. Empty: each episode is one
    completion, which `task.reward` judges."""
    reward: RewardName = "exact_match"
    """Reward function: a built-in one (`exact_match`, `math_answer`, `reasoning_gym`), or your own as `module:function`. It may
    be plain or async, takes one completion, a group or a batch, and returns numbers or named parts: docs/rewards.md."""
    reward_weights: dict[str, float] = msgspec.field(default_factory=dict)
    """Weights of the named parts that the reward function returns; their weighted sum is the reward. A part that is not listed
    has weight 1."""
    reward_timeout_s: PositiveFloat = 30.0
    """Time limit for one call of the reward function, in seconds. For a plain (not async) function that takes one completion,
    the limit applies to all calls of a group together."""
    reward_retry_s: NonNegativeFloat = 600.0
    """Time for which a group is retried while its reward is temporarily unavailable (a time limit, a lost connection, HTTP 429
    or 5xx, or `RewardUnavailable`), with back-off, in seconds. Its lease is extended by this time. 0: such a group fails at
    once. With `task.environment`, how long to keep replaying an episode that fails for such a reason."""


class EnvironmentSection(Section, frozen=True):
    """Limits on episodes, where `task.environment` names a function."""

    workers: PositiveInt = 1
    """Number of processes that run the function, in each actor. One process plays hundreds of waiting episodes; use more if the
    function computes."""
    turn_timeout_s: PositiveFloat = 60.0
    """Time limit for your function's own work before its first turn, between two turns, and after the last, in seconds."""
    episode_timeout_s: PositiveFloat = 300.0
    """Time limit for an episode, sampling included, in seconds."""
    max_retries: NonNegativeInt = 2
    """Number of times that an episode is played again after a time limit or a lost process. After that its lease fails.
    Temporary failures of services have their own limit, `task.reward_retry_s`."""
    tool_parser: str = ""
    """vLLM's name for the format in which the model writes tool calls (`hermes`, `qwen3_xml`, `llama3_json`, ...). Empty: turns
    are text and call no tools. On a machine with a GPU each environment process imports vLLM for it, which takes about 8 s and
    half a gigabyte."""
    sampling: Literal["refuse", "override"] = "refuse"
    """Treatment of requests to `chat.url` with fields that would change the sampling distribution: a temperature other than
    `rollout.temperature`, penalties, a grammar, stop strings. refuse: the agent gets an error. override: such fields are
    ignored, and the requests counted (`reward_part/overridden_requests`)."""
    identical_requests: Literal["answer_again", "sample_again"] = "answer_again"
    """Treatment of a request to `chat.url` that equals an earlier one and has no retry counter. answer_again: it gets the same
    answer, because clients repeat requests after a timeout. sample_again: it gets a new one, for agents that sample several
    answers and choose."""
    reasoning_parser: str = ""
    """vLLM's name for the format in which the model writes its reasoning (`qwen3`, `deepseek_r1`, ...). Empty: reasoning stays
    in the text of a turn."""
    python: str = ""
    """Path of the Python interpreter that runs the environment; its packages may differ from offbeat's. Empty: offbeat's own
    Python, or that of the virtual environment that `environment.requirements` makes."""
    requirements: str = ""
    """File with pip requirements. Each machine installs them once, into a virtual environment in its cache, and the environment
    runs there. If `environment.python` is set, the virtual environment is made with that Python. Empty: nothing is
    installed."""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of an environment that has a Python of its own, or is one of a framework."""


class JudgeSection(Section, frozen=True):
    """A server that rewards and environments ask with `offbeat.judge` (docs/rewards.md)."""

    url: str = ""
    """Base address of an OpenAI-compatible server, such as `https://api.openai.com/v1`. Empty: no judge."""
    model: str = ""
    """Name of the model at the server. Required with `judge.url`."""
    key_env: str = ""
    """Name of the environment variable that holds the server's key; the key itself is written nowhere. Empty: no key."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further fields of each request, for example `{max_tokens = 512}`. `temperature` is 0 unless given."""
    max_concurrent: PositiveInt = 32
    """Maximum number of requests at the same time, per actor. Its reward or environment processes get equal shares."""
    requests_per_minute: PositiveFloat | None = None
    """Maximum number of requests per minute, repeated ones included, of all processes of an actor together. none: no limit."""
    timeout_s: PositiveFloat = 20.0
    """Time limit of a request, in seconds. A request that would wait longer than half of it because of
    `judge.requests_per_minute` is postponed."""
    max_retries: NonNegativeInt = 3
    """Number of times that a request is repeated, with back-off, after no answer, HTTP 408, 425, 429 or 5xx, or an unusable
    answer. After that the judge counts as unavailable: completions keep waiting for their rewards, and episodes are played
    again."""
    budget_tokens: PositiveInt | None = None
    """Number of tokens after which the run ends, in requests and answers together, over all actors and restarts. none: no
    limit."""
    cache: str = ""
    """Folder in which answers are cached; any number of processes and runs may share it. A request at temperature 0 is then not
    sent a second time. The cache stores answers, not prompts. When the answers exceed 1 GiB, the oldest are deleted. Empty: no
    cache."""


class RolloutSection(Section, frozen=True):
    """Sampling of completions, and the leases under which actors sample them."""

    group_size: PositiveInt = 8
    """Number of completions sampled per prompt. They form one group, whose mean reward is the default baseline."""
    max_new_tokens: PositiveInt = 1024
    """Maximum length of a completion, in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, at least 0.01. The learner divides its logits by the same number."""
    lease_timeout_s: PositiveFloat = 600.0
    """Time an actor has to return the group of a lease, in seconds. After that the lease expires and the prompt is
    re-queued."""


class StalenessSection(Section, frozen=True):
    """Bounds on the policy lag: the number of optimizer steps between sampling a group and training on it."""

    max_staleness: NonNegativeInt = 4
    """Staleness bound, in optimizer steps: the learner only hands out work that would still be within this policy lag when its
    turn to be trained comes. 0: synchronous, on-policy training. `max_off_policy_steps` is another name for this setting."""
    target: Literal["auto", "bound"] = "auto"
    """Amount of work that is handed out ahead, within `staleness.max_staleness`. auto: just enough that the learner does not
    wait for rollouts, so that groups are no older than needed. bound: as much as the bound allows."""
    staleness_policy: Literal["gate", "drop", "abort"] = "gate"
    """Treatment of a group that exceeds `staleness.max_staleness` anyway. gate: train on it and count it. drop: discard it when
    its turn comes and re-queue its prompt. abort: like drop, and also cancel generation that is already too old."""
    hard_max_staleness: NonNegativeInt | None = None
    """Second bound, for `staleness.staleness_policy = "gate"`, in optimizer steps: a group whose lag exceeds it when its turn
    comes is dropped and its prompt re-queued. none: no group is dropped."""
    lag_of: Literal["oldest_token", "token_mean", "last_segment"] = "oldest_token"
    """Policy version that counts as a group's version when weights changed during a completion. oldest_token: that of the
    group's oldest token. token_mean: the mean over all tokens. last_segment: the version each completion ended with, the oldest
    of them. The lag from it is compared with `staleness.hard_max_staleness`, and with `staleness.max_staleness` to drop or
    count late groups."""
    auto: bool = False
    """Adapt `staleness.max_staleness` during the run, for `staleness.staleness_policy = "gate"`. The bound falls while the
    measured drift is large compared with the noise floor. It rises, up to `staleness.hard_max_staleness`, while the drift is
    small and the learner waits for rollouts because of the bound."""


class HubSection(Section, frozen=True):
    """The connection between the learner and its actors and operators."""

    address: str = "tcp://127.0.0.1:5700"
    """Address at which actors reach the learner, as `tcp://HOST:PORT`; `offbeat train` replaces port 0 with a free port. For a
    learner that may move, `file:PATH`: the learner writes its address into this file, which all machines must see, and actors
    read it whenever they look for the learner."""
    bind: str = ""
    """Address that the learner binds, such as `tcp://*:5700`. Empty: `hub.address`. Required if `hub.address` is a file. Port 0
    is any free port; for `*` the file contains the machine's host name."""
    key: str = ""
    """This service's secret key file, made by `offbeat keygen`; `{name}` is replaced by the service's name. Empty: no keys, and
    the hub binds to loopback only."""
    learner_key: str = ""
    """The learner's public key file, by which actors and operators recognize the learner. Required with `hub.key`."""
    allowed_keys: str = ""
    """File with the public keys that may connect to the learner. The learner reads it again when it changes. Required with
    `hub.key`."""
    max_actors: PositiveInt = 1024
    """Maximum number of connected actors; further ones are refused."""
    dead_after_s: PositiveFloat = 15.0
    """Time without a message after which a peer counts as dead, in seconds. A dead actor's leases go to others."""
    max_message_mb: Annotated[int, Meta(ge=1, le=65536)] = 256
    """Maximum size of a message, in MB; larger messages are not received."""


class LogSection(Section, frozen=True):
    """The rollout log in `run.dir/log`: the events of every lease, and every accepted group."""

    enabled: bool = True
    """Write the rollout log. Without it, a restarted learner has its rollouts generated again."""
    fsync: Literal["off", "second", "ack"] = "off"
    """Time at which records are forced to disk. off: never; records survive the death of every process, but not a power
    failure. second: at most once a second. ack: before every acknowledgement."""
    retain_mb: Annotated[int, Meta(ge=128)] = 1024
    """Size above which the oldest files of the log, of 64 MB each, are deleted, in MB. Files that the oldest kept checkpoint
    needs are kept; the learner then writes an early checkpoint."""
    min_free_mb: PositiveInt = 64
    """Free disk space below which no lease is granted, in MB."""


class WeightsSection(Section, frozen=True):
    """Transport of weights from the learner to the actors."""

    backend: Literal["auto", "gloo", "nccl", "pull"] = "auto"
    """Transport. gloo: collective broadcast of CPU tensors. nccl: collective broadcast of GPU tensors. pull: each actor
    downloads each version from the learner, encrypted if the hub is. auto: nccl if the learner trains on a GPU, otherwise gloo;
    `offbeat train` uses gloo if processes share a GPU. With nccl, actors without their own GPU pull; if there are no other
    actors, all use gloo."""
    port: Port = 0
    """Port of the collective's rendezvous store on the learner's host. 0: any free port."""
    pull_port: Port = 0
    """Port of the weight server on the learner's host. 0: any free port."""
    delta: bool = False
    """Send the difference between two versions, compressed and lossless, to an actor that has the older one, for
    `weights.backend = "pull"`. It suits slow links and small learning rates (docs/deployment.md). The learner's machine needs
    memory for up to two more copies of the weights."""
    on_canary_mismatch: Literal["drop", "flag"] = "drop"
    """Treatment of buffered groups that a quarantined actor sampled after its last good version. drop: drop them. flag: keep
    them, and list them in an event of `metrics.jsonl`."""
    canary_tolerance: PositiveFloat | None = None
    """Largest allowed difference between an engine's and the learner's log-prob of a token of the canary prompt, in nats. An
    actor that exceeds it is quarantined; if every actor exceeds it four times in a row, the run stops with an error. none:
    limits based on the noise of each actor's engine, measured when it joins (docs/reliability.md)."""
    bucket_mb: PositiveInt = 8
    """Size of one broadcast, in MB. 8 to 64 are equally fast with gloo; 64 and more suit nccl."""
    timeout_s: PositiveFloat = 60.0
    """Time limit for each phase of an update, in seconds. An actor that misses it is skipped in the update."""
    interval: PositiveInt = 1
    """Number of optimizer steps between updates."""


class ActorSection(Section, frozen=True):
    """The actors and their engine."""

    name: Annotated[str, Meta(pattern=f"{NAME_PATTERN}|^$")] = ""
    """Name of the actor, unique among live actors: letters, digits, `.`, `_`, `@` and `-`. Empty: the host name and the process
    id."""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """Inference engine. auto: vLLM if it is installed, otherwise transformers."""
    engine_options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options passed to the engine unchanged (vLLM: `EngineArgs`; transformers: `ContinuousBatchingConfig`)."""
    max_inflight_groups: Annotated[int, Meta(ge=1, le=1 << 18)] = 16
    """Maximum number of groups that an actor works on at the same time (its credit); at most 262144."""
    on_update: Literal["keep_kv", "recompute_kv"] = "keep_kv"
    """Treatment of the KV cache of running completions at a weight update. keep_kv is faster: later tokens attend to keys of
    the older weights, and the recorded behavior log-probs are still those that were sampled from. recompute_kv computes the
    cache again."""
    reward_workers: PositiveInt = 1
    """Number of processes that run a plain (not async) reward function."""
    reward_concurrency: PositiveInt = 64
    """Maximum number of calls of an async reward function at the same time, in each actor."""
    reward_calls_per_s: PositiveFloat | None = None
    """Maximum number of calls of the reward function started per second, in each actor. none: no limit."""
    reward_batch_size: PositiveInt = 64
    """Maximum number of completions per call of a reward function that takes completions of any prompts (`samples`)."""
    leave: Literal["finish", "return"] = "finish"
    """Treatment of unfinished groups when SIGTERM or Ctrl-C asks the actor to leave. finish: the actor finishes what it can
    within `actor.leave_within_s` and returns the rest. return: it returns all of them at once. A second signal ends the actor
    immediately."""
    leave_within_s: PositiveFloat = 20.0
    """Maximum time that a leaving actor continues to work, in seconds. It then waits up to `hub.dead_after_s` for the learner
    to acknowledge what it sent. The notice period of preemptible machines must cover both."""
    connect_timeout_s: NonNegativeFloat = 0.0
    """Time without an answer from the learner after which the actor gives up, in seconds. 0: wait forever, with a message every
    30 s."""


class EvaluationSection(Section, frozen=True):
    """Evaluation on held-out prompts, generated by the same actors while training goes on."""

    interval: NonNegativeInt = 0
    """Number of optimizer steps between evaluations. 0: no evaluation."""
    num_prompts: PositiveInt = 64
    """Number of prompts, taken from the start of each set in `data.eval_data`."""
    group_size: PositiveInt = 1
    """Number of completions per prompt."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature. 0: greedy decoding."""
    pass_reward: PositiveFloat = 1.0
    """Smallest reward with which a completion solves its prompt. pass@k: the share of prompts that any of k completions
    solves."""
    function: Annotated[str, Meta(pattern=r"^([\w.]+:\w+)?$")] = ""
    """Your own numbers, as `module:function`. It takes the completions of a finished evaluation and returns numbers by name
    (docs/own_code.md). Empty: no such function."""


class MetricsSection(Section, frozen=True):
    """Metrics beside `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard events to `run.dir/tensorboard`."""
    wandb_project: str = ""
    """Weights & Biases project; needs the `wandb` extra. Empty: off."""
    mlflow_experiment: str = ""
    """MLflow experiment, on the server or in the database named by the environment variable MLFLOW_TRACKING_URI; created if it
    does not exist. Needs the `mlflow` extra. Empty: off."""
    trackio_project: str = ""
    """trackio project, in the local database or the one named by TRACKIO_SERVER_URL or TRACKIO_SPACE_ID; needs the `trackio`
    extra. Empty: off."""
    bind: Annotated[str, Meta(pattern=r"^(\S+:\d{1,5})?$")] = "127.0.0.1:0"
    """Address, as `HOST:PORT`, of the learner's live page, and of `/metrics`, `/healthz` and `/readyz` for monitors; port 0 is
    a free port, which the log names. Anyone who can reach it can read prompts and completions. Empty: no page."""
    actor_bind: Annotated[str, Meta(pattern=r"^(\S+:\d{1,5})?$")] = ""
    """Address, as `HOST:PORT`, at which each actor serves `/metrics`, `/healthz` and `/readyz` for monitors. For several actors
    on one machine use port 0, a free port, which the log names. Empty: none."""
    callback: Annotated[str, Meta(pattern=r"^([\w.]+:\w+)?$")] = ""
    """Your own function, as `module:function`, that is called with each row of `metrics.jsonl` as a dict. It runs in its own
    process, so its errors cannot slow or end the learner; it may ask the run to stop (docs/callbacks.md). Empty: no such
    function."""
    routing_interval: NonNegativeInt = 10
    """Number of optimizer steps between measurements of a mixture-of-experts model's routing. 0: never."""


class LaunchSection(Section, frozen=True):
    """The processes that `offbeat train` starts on this machine."""

    num_actors: PositiveInt = 1
    """Number of actor processes."""
    learner_processes: PositiveInt = 1
    """Number of learner processes (ranks)."""
    learner_gpus: tuple[int, ...] = ()
    """GPU of each learner process, as an index into `CUDA_VISIBLE_DEVICES` if that is set. Empty: the first GPUs, or the CPU if
    there are none."""
    actor_gpus: tuple[tuple[int, ...], ...] = ()
    """GPUs of each actor, one list per actor, as indices like those of `launch.learner_gpus`. Empty: the GPUs that the learner
    does not use, or shares of the learner's if it uses all; `offbeat check` prints the plan."""
    gpu_sharing: Literal["auto", "parts", "turns"] = "auto"
    """Division of one GPU that the learner and the actors share. parts: each has a part of its memory all the time. turns: vLLM
    gives its memory back while the learner trains on a batch, so each has more, but they work one after the other. auto: parts
    where they fit, else turns."""
    max_restarts: NonNegativeInt = 3
    """Number of times that a dead service is restarted before the run is stopped. Ten minutes of work restore the full number.
    0: never restart."""


class ScaleSection(Section, frozen=True):
    """The number of actors, which the launcher and `offbeat reconcile` follow."""

    actors: PositiveInt | None = None
    """Number of actors that the launcher or `offbeat reconcile` keeps running; `offbeat scale RUN N` changes it during the run.
    Actors that you start yourself are extra. none: `launch.num_actors`."""
    auto: bool = False
    """Adapt `scale.actors` during the run. The number grows while the learner waits for rollouts and no actor has capacity, and
    falls while lease slots stay empty. If more actors would not help, an event and `offbeat status` say what would."""
    min: PositiveInt = 1
    """Smallest number of actors, for `scale.auto`."""
    max: PositiveInt = 8
    """Largest number of actors, for `scale.auto`."""
    max_actor_hours: PositiveFloat | None = None
    """Sum of all actors' time, in hours, after which `scale.auto` falls to `scale.min`. none: no limit."""


class Config(Section, frozen=True):
    """All settings of a run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    task: TaskSection = TaskSection()
    environment: EnvironmentSection = EnvironmentSection()
    judge: JudgeSection = JudgeSection()
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
    scale: ScaleSection = ScaleSection()


def actors_wanted(config: Config) -> int:
    """Return the number of actors that the run should have."""
    return config.scale.actors or config.launch.num_actors


def most_actors(config: Config) -> int:
    """Return the largest number of actors that the run may have, unless somebody changes it while the run goes on."""
    return max(actors_wanted(config), config.scale.max if config.scale.auto else 0)


def has_own_critic(config: Config) -> bool:
    """Return whether the run has a critic whose network is not the policy's."""
    return config.advantage.baseline == "critic" and config.critic.trunk == "own"


def max_episode_tokens(config: Config) -> int:
    """Return the most tokens of an episode in all its sequences: those that a pass of the learner may have anyway."""
    return max(config.train.micro_batch_tokens, config.model.max_length)


FRAMEWORKS = ("gymnasium", "harbor", "nemo_gym", "openenv", "verifiers")
"""Names before the colon of `task.environment` that stand for a framework."""


class Environment(NamedTuple):
    """The settings that name a run's environment."""

    function: str = ""
    """`task.environment`."""
    python: str = ""
    """`environment.python`."""
    requirements: str = ""
    """`environment.requirements`."""
    arguments: Mapping[str, Any] = {}
    """`environment.arguments`."""

    @property
    def is_external(self) -> bool:
        """The environment runs in a process with a Python of its own; those of a framework always do."""
        return bool(self.python or self.requirements or self.function.partition(":")[0] in FRAMEWORKS)


NO_ENVIRONMENT = Environment()


def environment_of(config: Config) -> Environment:
    """Return the environment that the settings name."""
    section = config.environment
    return Environment(config.task.environment, section.python, section.requirements, section.arguments)


def eval_sets(data: DataSection) -> dict[str, str]:
    """Return the sources of `data.eval_data` by the names of the sets; a single one has the name ""."""
    if isinstance(data.eval_data, dict):
        return data.eval_data
    return {"": data.eval_data} if data.eval_data else {}


def eval_setting(name: str) -> str:
    """Return the setting that gives the source of a set."""
    return f"data.eval_data.{name}" if name else "data.eval_data"
