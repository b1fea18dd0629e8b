"""The messages that actors and the learner exchange: one tagged union for each direction.

Large arrays (token ids, log-probs) are not fields: `protocols.wire` carries them as raw frames beside the message.
Every struct forbids unknown fields: nothing is half understood. Within a major protocol version a newer minor may only add
fields that have defaults, and messages that the other side can do without: `protocols.wire` takes what it knows.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PROTOCOL_MAJOR = 2
"""Peers of another major version are refused, by name."""
PROTOCOL_MINOR = 2
"""Peers of another minor version are welcome; see the module's docstring."""

# What is received is within these bounds; an encoder does not look.
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A number that cannot be negative: an id, a version, a size."""
NaturalOrNone = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
"""The same, or -1 for none."""
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e18)]
Checksum = Annotated[int, Meta(ge=0)]
"""`common.weights.checksum`; all 64 bits are used."""
Name = Annotated[str, Meta(max_length=256)]
FreeText = Annotated[str, Meta(max_length=1 << 16)]
"""A sentence for logs and operators; no code reads its content."""
LeaseIds = Annotated[tuple[Natural, ...], Meta(max_length=1 << 18)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """Base of all messages: immutable, strict, tagged on the wire with the class name.

    A renamed class keeps its first name as its tag.
    """


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One named weight in the flat weight buffer."""

    name: str
    """Hugging Face parameter name."""
    shape: tuple[Natural, ...]
    dtype: str
    """torch dtype without its prefix: `float32`, `bfloat16`."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the completions of one lease are sampled.

    There is no top_p, top_k or min_p: a truncated distribution would make the behavior log-probs those of another policy.
    """

    max_new_tokens: Positive
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    """0 means greedy; only evaluation may ask for it."""


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """A stretch of one completion sampled under one policy version; it ends where the next one starts."""

    policy_version: Natural
    first_token: Natural
    """Index into the completion of the first token sampled under `policy_version`."""


class CompletionMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """All of one completion that is not an array."""

    num_tokens: Positive
    finish_reason: Literal["stop", "length"]
    reward: float
    segments: Annotated[tuple[Segment, ...], Meta(min_length=1)]


class ModelHashes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of the model must be equal at learner and actor, as short hashes (`common.models.hash_model`).

    Weights are not among them: the learner sends its own.
    """

    config: Name
    tokenizer: Name
    chat_template: Name


class EngineInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What samples in an actor: recorded by the learner, and compared where a difference would bias training."""

    name: Name
    """`vllm` or `transformers`."""
    version: Name
    dtype: Name
    device: Name
    max_model_len: Natural
    """Longest prompt plus completion, in tokens."""
    hashes: ModelHashes


class ActorStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an actor did since it started; counters only grow."""

    num_generated_tokens: Natural = 0
    num_groups_sent: Natural = 0
    num_running_completions: Natural = 0
    seconds: Annotated[dict[Name, Seconds], Meta(max_length=64)] = {}
    """Main-loop seconds by what they went to: `generate`, `commit_weights`, `wait_leases`, `wait_weights`, `wait_rewards`."""


# Actor to learner


class Hello(Message, frozen=True):
    """First message of a connection, and again whenever the learner says it does not know the sender."""

    actor: Annotated[str, Meta(min_length=1, max_length=256)]
    """The actor's name, unique among live actors."""
    incarnation: Annotated[int, Meta(ge=0)]
    """Random, another for each process: of two actors with one name the one that came last stays."""
    engine: EngineInfo
    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    """`rollout.temperature` of the actor's own config: it must be the learner's."""
    reward: FreeText
    """`task.reward` of the actor's own config: the actor computes rewards, so it must be the learner's."""
    software: Name
    """Version of offbeat."""
    run_id: Name = ""
    """The run the actor has worked for; empty before its first welcome."""
    lease_ids: LeaseIds = ()
    """What it holds: leases at work, and groups that are not acknowledged. All others granted to it are lost."""


class Credit(Message, frozen=True):
    """How many leases the actor is willing to hold at once. Absolute, so a lost or repeated message does no harm."""

    capacity: Annotated[int, Meta(ge=0, le=1 << 18)]


class GroupDone(Message, frozen=True):
    """One finished group; its frames hold the token ids and the behavior log-probs of all completions, concatenated."""

    lease_id: Natural
    completions: Annotated[tuple[CompletionMeta, ...], Meta(min_length=1, max_length=1 << 16)]
    generate_s: Seconds
    """Seconds from the first token's submission to the last completion's end, rewards excluded."""


class LeaseFailed(Message, frozen=True):
    """The actor gives a lease back without a group."""

    lease_id: Natural
    reason: Name
    """A short word that the learner counts by: `reward_error`, `reward_timeout`, `returned`, ..."""
    detail: FreeText = ""
    """One line for the log."""


class ActorHeartbeat(Message, frozen=True):
    """Sent every `hub.heartbeat_s`."""

    policy_version: NaturalOrNone
    """Version of the weights in the engine; -1 before the first update."""
    stats: ActorStats
    lease_ids: LeaseIds
    """As in `Hello`."""
    seen_lease_id: NaturalOrNone
    """The last `LearnerHeartbeat`'s: whatever was leased up to it and is not in `lease_ids` was lost on the way."""


class WeightsStaged(Message, frozen=True):
    """The whole update lies in the actor's staging buffer, or the transfer failed and changed nothing."""

    policy_version: Natural
    epoch: NaturalOrNone
    """The collective's membership epoch; -1 for a pull."""
    error: FreeText = ""


class WeightsCommitted(Message, frozen=True):
    """The engine samples with these weights from now on."""

    policy_version: Natural
    stall_s: Seconds
    """Seconds during which the commit kept the engine from stepping."""


class CanaryScored(Message, frozen=True):
    """The engine's log-probs of the canary tokens under `policy_version`: frame 0, float32 `[len(canary) - 1]`."""

    policy_version: Natural


class CanaryRouted(Message, frozen=True):
    """The experts that the engine sent the canary's tokens to under `policy_version`; of mixtures of experts only.

    Frame 0: int32 `[num_tokens, num_layers, top_k]`, in no particular order among the `top_k`. Since minor version 1: a
    learner before it leaves the message out, where it would refuse a second array in `CanaryScored`.
    """

    policy_version: Natural
    num_tokens: Annotated[int, Meta(ge=1, le=1 << 16)]
    """`len(canary) - 1`: the tokens whose successors have log-probs."""
    num_layers: Annotated[int, Meta(ge=1, le=1 << 12)]
    """Those that have experts."""
    top_k: Annotated[int, Meta(ge=1, le=1 << 10)]
    """Experts of one token in one layer."""


class Goodbye(Message, frozen=True):
    """The actor leaves; its leases may be given to others at once."""

    reason: FreeText


class ChunkRequest(Message, frozen=True):
    """To the weight server, not the hub: send one chunk of these weights."""

    policy_version: Natural
    index: Natural


class StatusRequest(Message, frozen=True):
    """An operator asks how the run is; no hello precedes it."""


class LiveSettingsRequest(Message, frozen=True, tag="TuneRequest"):
    """An operator asks to change settings of the running job, all of them or none; no hello precedes it.

    Since minor version 2, as all that goes with it: a learner before it does not answer.
    """

    settings: Annotated[dict[Name, Name], Meta(min_length=1, max_length=64)]
    """`section.key` to its new value, as TOML."""
    who: Name
    """Who asks, as their machine knows them; the learner adds the name of their key."""


ActorMessage = (
    Hello
    | Credit
    | GroupDone
    | LeaseFailed
    | ActorHeartbeat
    | WeightsStaged
    | WeightsCommitted
    | CanaryScored
    | CanaryRouted
    | Goodbye
    | ChunkRequest
    | StatusRequest
    | LiveSettingsRequest
)

# Learner to actor


class Welcome(Message, frozen=True):
    """The answer to `Hello`: the contract of this run. Frame 0: int32 canary token ids."""

    run_id: str
    learner_incarnation: Natural
    """Random, another for each learner process: weights staged from an earlier one must not be committed."""
    max_message_bytes: Natural
    """The hub drops the connection on a larger frame: the actor gives such a lease back instead."""
    layout: tuple[TensorSpec, ...]
    """The flat weight buffer, in order."""
    policy_version: Natural


class Refused(Message, frozen=True):
    """The learner will not work with this actor; the actor stops and prints the reason."""

    reason: str


class SayHello(Message, frozen=True, tag="Unknown"):
    """The learner does not know the sender, because it restarted or took the actor for dead: send `Hello` again."""


class Lease(Message, frozen=True):
    """One group to generate. Frame 0: int32 prompt token ids."""

    lease_id: Natural
    prompt_id: Natural
    """Index of the row in the task's data."""
    group_size: Positive
    sampling: Sampling
    min_policy_version: Natural
    """The actor must not start the group under older weights than these."""
    timeout_s: Seconds
    """Seconds after which the learner gives the prompt to another actor."""
    prompt: str
    """The prompt as text, for the reward."""
    row: str
    """The data row as JSON, for the reward."""


class Ack(Message, frozen=True):
    """The learner has taken over what was sent under this lease (or never wants it); the actor forgets it."""

    lease_id: Natural
    outcome: Literal["accepted", "duplicate", "unknown", "rejected"]
    detail: str = ""


class Cancel(Message, frozen=True):
    """Stop working on these leases; no answer is expected."""

    lease_ids: tuple[Natural, ...]


class CreditLimit(Message, frozen=True, tag="Concurrency"):
    """An operator has changed how many groups actors work on at once: send `Credit` with this capacity.

    Since minor version 2: an actor before it keeps to its own config.
    """

    capacity: Annotated[int, Meta(ge=1, le=1 << 18)]


class WeightUpdate(Message, frozen=True):
    """Join this membership epoch's collective and receive `policy_version` into the staging buffer."""

    policy_version: Natural
    epoch: Natural
    """Names the process group: a member of an older epoch cannot touch a newer one."""
    rank: Natural
    world_size: Positive
    store_host: str
    store_port: Natural
    backend: Literal["gloo", "nccl"]
    bucket_bytes: Positive
    """Size of one broadcast: with another one at either end the transfer ends well, with the wrong bytes."""
    checksum: Checksum
    """`common.weights.checksum` of the whole buffer; the actor commits nothing else."""
    timeout_s: Seconds


class WeightPull(Message, frozen=True):
    """Fetch `policy_version` from the weight server, chunk by chunk, into the staging buffer."""

    policy_version: Natural
    host: str
    port: Natural
    num_bytes: Natural
    chunk_bytes: Positive
    checksum: Checksum
    """As in `WeightUpdate`."""
    timeout_s: Seconds
    """Longest wait for the next chunk."""


class Chunk(Message, frozen=True):
    """The answer to `ChunkRequest`. Frame 0: the bytes."""

    policy_version: Natural
    index: Natural
    checksum: Checksum
    """`common.weights.checksum` of the bytes."""


class ChunkGone(Message, frozen=True):
    """The weight server does not hold (or no longer) what was asked for."""

    policy_version: Natural
    index: Natural


class LearnerHeartbeat(Message, frozen=True):
    """The answer to `ActorHeartbeat`."""

    newest_lease_id: NaturalOrNone
    """The newest lease sent to this actor before this message; -1: none."""


class Stop(Message, frozen=True):
    """The run is over; the actor leaves."""

    reason: str


class MemberStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One live actor, for the operator."""

    name: str
    state: Literal["working", "new", "quarantined", "unreachable"]
    """`new`: it has no weights of this learner process yet."""
    policy_version: NaturalOrNone
    num_leases: Natural
    capacity: Natural
    tokens_per_s: float
    """Over the last seconds between two heartbeats."""
    last_seen_s: float
    """Seconds since it was last heard."""
    engine: str


class SettingChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A setting that was changed while the run went on; values are TOML."""

    setting: str
    """`section.key`."""
    before: str
    after: str
    who: str
    at: float
    """Seconds since the epoch, by the learner's clock."""
    policy_version: Natural
    """The learner's, then."""


class StatusReport(Message, frozen=True):
    """The answer to `StatusRequest`."""

    run_id: str
    policy_version: Natural
    num_steps: Natural
    published_version: NaturalOrNone
    doing: str
    """What the training loop does or waits for."""
    doing_s: float
    """For how long."""
    waiting_for: str
    """What keeps the next batch; empty when nothing does."""
    uptime_s: float
    members: tuple[MemberStatus, ...]
    ledger: dict[str, int]
    """Its sums; drops as `dropped/REASON`."""
    num_ready: Natural
    """Groups in the buffer."""
    num_generating: Natural
    epoch: Natural
    """Pass over the data, from 0."""
    epoch_position: float
    """Share of this pass that was leased."""
    log_bytes: Natural
    """Size of the rollout log."""
    problems: tuple[str, ...]
    """Whatever an operator should know: the log is full, weights excluded, ..."""
    rejected: dict[str, int]
    """Messages refused, by `actor: reason`."""
    changed_settings: tuple[SettingChange, ...] = msgspec.field(default=(), name="tuned")
    """Settings that are not the config file's any more; `before` is the file's value."""


class LiveSettingsReport(Message, frozen=True, tag="TuneReport"):
    """The answer to `LiveSettingsRequest`."""

    policy_version: Natural
    """The learner's, when it took the request."""
    error: str = ""
    """Why nothing was changed; empty when all was."""
    changed: tuple[SettingChange, ...] = ()
    """Those that had another value before."""
    warnings: tuple[str, ...] = ()
    """What is allowed, and probably not meant."""


LearnerMessage = (
    Welcome
    | Refused
    | SayHello
    | Lease
    | Ack
    | Cancel
    | CreditLimit
    | WeightUpdate
    | WeightPull
    | Chunk
    | ChunkGone
    | LearnerHeartbeat
    | Stop
    | StatusReport
    | LiveSettingsReport
)
