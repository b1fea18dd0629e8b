"""The messages that actors and the learner exchange: one tagged union for each direction.

Large arrays (token ids, log-probs) are not fields: `protocols.wire` carries them as raw frames beside the message.
Every struct forbids unknown fields, so that no message is half understood. Within a major protocol version a newer minor may
only add fields that have defaults, and messages that the other side can do without; `protocols.wire` leaves out unknown ones.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from offbeat.protocols.fields import (
    Checksum,
    Counts,
    FreeText,
    Label,
    LeaseIds,
    Name,
    NameOrEmpty,
    Natural,
    NaturalOrNone,
    Positive,
    Seconds,
    Sources,
)
from offbeat.protocols.message_parts import MAX_PARTS, EngineInfo, MemberStatus, SettingChange, Vitals
from offbeat.protocols.payload import MAX_IMAGES, CompletionMeta, ExpertsMeta, ImageReference

PROTOCOL_MAJOR = 1
"""Peers of another major version are refused with a reason."""
PROTOCOL_MINOR = 0
"""Peers of another minor version are accepted; see the module's docstring."""
MAX_BASES = 16
"""Largest number of differences that lead from one version of the weights to a newer one."""


NcclTransport = Literal["P2P", "SHM"]
"""A transport of NCCL between GPUs of one machine: peer-to-peer, or shared memory of the host."""


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
    """The sampling parameters of one lease.

    There is no top_p, top_k or min_p: a truncated distribution would make the behavior log-probs those of another policy.
    """

    max_new_tokens: Positive
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    """0 means greedy; only evaluation may ask for it."""


class ActorStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counters of an actor since its start. `ActorRow` explains the same fields; the roster copies them by name."""

    num_generated_tokens: Natural = 0
    num_groups_sent: Natural = 0
    num_running_completions: Natural = 0
    seconds: Annotated[dict[Name, Seconds], Meta(max_length=64)] = {}
    judge: Counts = {}
    environment: Counts = {}


class RewardTrouble(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rewards of an actor that are temporarily unavailable: it keeps the completions and tries again."""

    waiting_s: Seconds
    """Seconds since the first failure of the group that waits longest."""
    problem: FreeText
    """The newest failure, one line."""
    lease_ids: LeaseIds
    """The leases that wait for their rewards."""


# Actor to learner


class Hello(Message, frozen=True):
    """First message of a connection, and again whenever the learner says it does not know the sender."""

    actor: Name
    """The actor's name, unique among live actors."""
    incarnation: Annotated[int, Meta(ge=0)]
    """Random, one for each process. When two actors have one name, the later one stays."""
    engine: EngineInfo
    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    """`rollout.temperature` in the actor's config; it must equal the learner's."""
    reward: FreeText
    """`task.reward` in the actor's config; it must equal the learner's, because the actor computes rewards."""
    software: Label
    """Version of offbeat."""
    run_id: NameOrEmpty = ""
    """The run the actor has worked for; empty before its first welcome."""
    lease_ids: LeaseIds = ()
    """Leases that the actor holds: at work, or answered and not acknowledged. All others granted to it are lost."""
    sources: Sources = {}
    """Hashes of the files that the actor's reward or environment is made of; empty for a built-in one."""


class Credit(Message, frozen=True):
    """The number of leases that the actor takes at once. Absolute, so a lost or repeated message does no harm."""

    capacity: Annotated[int, Meta(ge=0, le=1 << 18)]


class GroupDone(Message, frozen=True):
    """One finished group; its frames hold token ids and behavior log-probs of all sampled tokens, completions concatenated.

    A third frame, only where a completion has turns, holds the token ids of all their context; the last frame, only with
    `experts`, holds these.
    """

    lease_id: Natural
    completions: Annotated[tuple[CompletionMeta, ...], Meta(min_length=1, max_length=1 << 16)]
    generate_s: Seconds
    """Seconds from the submission of the group to the end of its last completion, without rewards."""
    reward_s: Seconds = 0.0
    """Seconds from then on until all rewards were known; 0 with an environment."""
    experts: ExpertsMeta | None = None
    """The experts of a mixture, where the run replays them; not with turns."""


class LeaseFailed(Message, frozen=True):
    """The actor gives a lease back without a group."""

    lease_id: Natural
    reason: Name
    """A short word that the learner counts by: `reward_error`, `reward_timeout`, `returned`, ..."""
    detail: FreeText = ""
    """One line for the log."""


HEARTBEAT_S = 1.0
"""Seconds between two heartbeats of an actor."""


class ActorHeartbeat(Message, frozen=True):
    """Sent every `HEARTBEAT_S`."""

    policy_version: NaturalOrNone
    """Version of the weights in the engine; -1 before the first update."""
    stats: ActorStats
    lease_ids: LeaseIds
    """Leases that the actor holds, as in `Hello`."""
    seen_lease_id: NaturalOrNone
    """`newest_lease_id` of the last `LearnerHeartbeat`. A lease up to it that is not in `lease_ids` was lost on the way."""
    reward_trouble: RewardTrouble | None = None
    """Rewards that are temporarily unavailable; None while rewards work."""


class WeightsStaged(Message, frozen=True):
    """The whole update is in the actor's staging buffer, or the transfer failed and changed nothing."""

    policy_version: Natural
    epoch: NaturalOrNone
    """The collective's membership epoch; -1 for a pull."""
    error: FreeText = ""
    delta_error: FreeText = ""
    """Reason why the pull of differences failed and all weights were pulled."""


class WeightsCommitted(Message, frozen=True):
    """The engine samples with these weights from now on."""

    policy_version: Natural
    stall_s: Seconds
    """Seconds during which the commit kept the engine from stepping."""


class CanaryScored(Message, frozen=True):
    """The engine's log-probs of the canary tokens under `policy_version`: frame 0, float32 `[len(canary) - 1]`."""

    policy_version: Natural


class FilesScored(Message, frozen=True):
    """The engine's log-probs of the canary under the model's files, sent at the welcome by an actor that scored them.

    The learner has loaded the same files, so the difference is the noise of this engine. Frame 0: float32
    `[len(canary) - 1]`.
    """


class CanaryRouted(Message, frozen=True):
    """The experts that the engine sent the canary's tokens to under `policy_version`; only for mixtures of experts.

    Frame 0: int32 `[num_tokens, num_layers, top_k]`, in no particular order among the `top_k`.
    """

    policy_version: Natural
    num_tokens: Annotated[int, Meta(ge=1, le=1 << 16)]
    """`len(canary) - 1`: the last token has no successor to predict."""
    num_layers: Annotated[int, Meta(ge=1, le=1 << 12)]
    """Number of layers that have experts."""
    top_k: Annotated[int, Meta(ge=1, le=1 << 10)]
    """Experts of one token in one layer."""


class Goodbye(Message, frozen=True):
    """The actor leaves; its leases may be given to others at once."""

    reason: FreeText


class ChunkRequest(Message, frozen=True):
    """A request to the weight server (not the hub) for one chunk of these weights."""

    policy_version: Natural
    index: Natural
    base: Checksum | None = None
    """One of `WeightPull.bases`: asks for the chunk's difference from that version to the next. None: asks for the chunk."""


class RunRequest(Message, frozen=True):
    """Asks for a part of the join settings (`protocols.message_parts`), for an actor without settings and model.

    No hello precedes it.
    """

    index: Natural
    """From 0; the answer says how many parts there are."""


class StatusRequest(Message, frozen=True):
    """An operator asks how the run is; no hello precedes it."""


class LiveSettingsRequest(Message, frozen=True):
    """An operator asks to change settings of the running job, all of them or none; no hello precedes it."""

    settings: Annotated[dict[Name, Label], Meta(min_length=1, max_length=64)]
    """`section.key` to its new value, as TOML."""
    who: Name
    """`user@host` of the operator; the learner adds the name of their key."""


ActorMessage = (
    Hello
    | Credit
    | GroupDone
    | LeaseFailed
    | ActorHeartbeat
    | WeightsStaged
    | WeightsCommitted
    | CanaryScored
    | FilesScored
    | CanaryRouted
    | Goodbye
    | ChunkRequest
    | RunRequest
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
    """The hub drops the connection on a larger frame, so the actor gives such a lease back instead."""
    layout: tuple[TensorSpec, ...]
    """The flat weight buffer, in order."""
    policy_version: Natural


class Refused(Message, frozen=True):
    """The learner will not work with this actor; the actor stops and prints the reason."""

    reason: str


class SayHello(Message, frozen=True):
    """The learner does not know the sender, because it restarted or took the actor for dead: send `Hello` again."""


class Lease(Message, frozen=True):
    """One group to generate. Frame 0: int32 prompt token ids. Frame 1, only with images: their files, one after another."""

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
    is_evaluation: bool = False
    """True for a held-out prompt."""
    images: Annotated[tuple[ImageReference, ...], Meta(max_length=MAX_IMAGES)] = ()
    """The prompt's images, in the order of their tokens."""


class Ack(Message, frozen=True):
    """The learner took over the answer to this lease, or does not want it; the actor forgets it."""

    lease_id: Natural
    outcome: Literal["accepted", "duplicate", "unknown", "rejected"]
    detail: str = ""


class Cancel(Message, frozen=True):
    """Stop working on these leases; no answer is expected."""

    lease_ids: tuple[Natural, ...]


class CreditLimit(Message, frozen=True):
    """An operator changed the number of groups that actors work on at once: send `Credit` with this capacity."""

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
    """Size of one broadcast. If the two ends differed, the transfer would succeed with wrong bytes."""
    checksum: Checksum
    """`common.weights.flat.checksum` of the whole buffer; the actor commits nothing else."""
    timeout_s: Seconds
    avoided: Annotated[tuple[NcclTransport, ...], Meta(max_length=2)] = ()
    """Transports between GPUs of one machine that NCCL must do without, the same for all members."""


class WeightPull(Message, frozen=True):
    """Fetch `policy_version` from the weight server, chunk by chunk, into the staging buffer."""

    policy_version: Natural
    host: str
    port: Natural
    num_bytes: Natural
    chunk_bytes: Positive
    checksum: Checksum
    """`common.weights.flat.checksum` of all bytes; the actor commits nothing else."""
    timeout_s: Seconds
    """Longest wait for the next chunk."""
    bases: Annotated[tuple[Checksum, ...], Meta(max_length=MAX_BASES)] = ()
    """Checksums of older versions, oldest first. The server has the difference from each to the next one, and from the last to
    `policy_version` (`common.weights.deltas`). An actor that holds one of them may fetch these instead of the weights."""


class Chunk(Message, frozen=True):
    """The answer to `ChunkRequest`. Frame 0: the bytes."""

    policy_version: Natural
    index: Natural
    checksum: Checksum
    """`common.weights.flat.checksum` of the bytes."""
    base: Checksum | None = None
    """The request's `base`."""


class ChunkGone(Message, frozen=True):
    """The weight server does not hold this version, or no longer."""

    policy_version: Natural
    index: Natural
    base: Checksum | None = None
    """The request's `base`."""


class RunPart(Message, frozen=True):
    """The answer to `RunRequest`. Frame 0: the bytes."""

    index: Natural
    num_parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    digest: Label
    """SHA-256 of all join settings, hexadecimal: parts of two do not mix."""


class LearnerHeartbeat(Message, frozen=True):
    """The answer to `ActorHeartbeat`."""

    newest_lease_id: NaturalOrNone
    """The newest lease sent to this actor before this message; -1: none."""


class Stop(Message, frozen=True):
    """The run is over; the actor leaves."""

    reason: str


class StatusReport(Message, frozen=True):
    """The answer to `StatusRequest`."""

    run_id: str
    policy_version: Natural
    num_steps: Natural
    published_version: NaturalOrNone
    doing: str
    """Activity of the training loop."""
    doing_s: float
    """Seconds since that activity began."""
    waiting_for: str
    """Reason why the next batch cannot start; empty when there is none."""
    uptime_s: float
    members: tuple[MemberStatus, ...]
    ledger: dict[str, int]
    """Sums of the lease ledger; drops as `dropped/REASON`."""
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
    """Sentences for the operator, such as a full log or excluded actors."""
    rejected: dict[str, int]
    """Messages refused, by `actor: reason`."""
    actors_wanted: Natural
    """Actors that the run should have: `scale.actors`, 0 once the run is over."""
    changed_settings: tuple[SettingChange, ...] = ()
    """Settings that differ from the config file; `before` is the file's value."""
    vitals: Vitals = Vitals()


class LiveSettingsReport(Message, frozen=True):
    """The answer to `LiveSettingsRequest`."""

    policy_version: Natural
    """The learner's policy version when it handled the request."""
    error: str = ""
    """Reason why nothing was changed; empty when everything was."""
    changed: tuple[SettingChange, ...] = ()
    """Settings that had another value before."""
    warnings: tuple[str, ...] = ()
    """New values that are allowed but probably a mistake."""


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
    | RunPart
    | LearnerHeartbeat
    | Stop
    | StatusReport
    | LiveSettingsReport
)
