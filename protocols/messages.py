"""The messages that actors and the learner exchange: one tagged union for each direction.

Large arrays (token ids, log-probs) are not fields: `protocols.wire` carries them as raw frames beside the message.
Every struct forbids unknown fields, so a peer of another protocol version is refused instead of half understood.
"""

from typing import Literal

import msgspec

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """What every message is: immutable, strict, tagged with its own class name."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One named weight in the flat weight buffer."""

    name: str
    """Hugging Face parameter name."""
    shape: tuple[int, ...]
    dtype: str
    """torch dtype without its prefix: `float32`, `bfloat16`."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the completions of one lease are sampled.

    There is no top_p, top_k or min_p: a truncated distribution would make the behavior log-probs those of another policy.
    """

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; only evaluation may ask for it."""


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A stretch of one completion sampled under one policy version; it ends where the next one starts."""

    policy_version: int
    first_token: int
    """Index into the completion of the first token sampled under `policy_version`."""


class CompletionMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of one completion that is not an array."""

    num_tokens: int
    finish_reason: Literal["stop", "length"]
    reward: float
    segments: tuple[Segment, ...]


class EngineInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What samples in an actor: recorded by the learner, and compared where a difference would bias training."""

    name: str
    """`vllm` or `transformers`."""
    version: str
    dtype: str
    device: str
    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    model_hash: str
    """Hash of the model's config.json and tokenizer files (`common.models.model_hash`)."""


class ActorStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an actor did since it started; counters only grow."""

    num_generated_tokens: int = 0
    num_groups_sent: int = 0
    num_running_completions: int = 0
    seconds: dict[str, float] = {}
    """Main-loop seconds by what they went to: `generate`, `commit_weights`, `wait_leases`, `wait_weights`, `wait_rewards`."""


# Actor to learner


class Hello(Message, frozen=True):
    """First message of a connection, and again whenever the learner says it does not know the sender."""

    actor: str
    """The actor's name, unique among live actors."""
    incarnation: int
    """Nanoseconds since the epoch when the actor started: of two actors with one name the newer wins."""
    engine: EngineInfo
    policy_version: int
    """Version of the weights in the engine; -1 before the first update."""


class Credit(Message, frozen=True):
    """How many leases the actor is willing to hold at once. Absolute, so a lost or repeated message does no harm."""

    capacity: int


class GroupDone(Message, frozen=True):
    """One finished group; its frames hold the token ids and the behavior log-probs of all completions, concatenated."""

    lease_id: int
    completions: tuple[CompletionMeta, ...]
    generate_s: float
    """Seconds from the first token's submission to the last completion's end, rewards excluded."""


class LeaseFailed(Message, frozen=True):
    """The actor gives a lease back without a group."""

    lease_id: int
    reason: str
    """A short word that the learner counts by: `reward_error`, `reward_timeout`, `returned`, ..."""
    detail: str = ""
    """One line for the log."""


class ActorHeartbeat(Message, frozen=True):
    """Sent every `hub.heartbeat_s`."""

    policy_version: int
    stats: ActorStats


class WeightsStaged(Message, frozen=True):
    """The whole update lies in the actor's staging buffer, or the transfer failed and changed nothing."""

    policy_version: int
    epoch: int
    error: str = ""


class WeightsCommitted(Message, frozen=True):
    """The engine samples with these weights from now on."""

    policy_version: int
    stall_s: float
    """Seconds during which the commit kept the engine from stepping."""


class CanaryScored(Message, frozen=True):
    """The engine's log-probs of the canary tokens under `policy_version`: frame 0, float32 `[len(canary) - 1]`."""

    policy_version: int


class Goodbye(Message, frozen=True):
    """The actor leaves; its leases may be given to others at once."""

    reason: str


ActorMessage = (
    Hello | Credit | GroupDone | LeaseFailed | ActorHeartbeat | WeightsStaged | WeightsCommitted | CanaryScored | Goodbye
)

# Learner to actor


class Welcome(Message, frozen=True):
    """The answer to `Hello`: the contract of this run. Frame 0: int32 canary token ids."""

    run_id: str
    learner_incarnation: int
    """Another one than before: the leases of the learner process before it are void."""
    layout: tuple[TensorSpec, ...]
    """The flat weight buffer, in order."""
    policy_version: int


class Refused(Message, frozen=True):
    """The learner will not work with this actor; the actor stops and prints the reason."""

    reason: str


class Unknown(Message, frozen=True):
    """The learner does not know the sender (it restarted, or took the actor for dead): say `Hello` again."""


class Lease(Message, frozen=True):
    """One group to generate. Frame 0: int32 prompt token ids."""

    lease_id: int
    prompt_id: int
    """Index of the row in the task's data."""
    group_size: int
    sampling: Sampling
    min_policy_version: int
    """The actor must not start the group under older weights than these."""
    timeout_s: float
    """Seconds after which the learner gives the prompt to another actor."""
    prompt: str
    """The prompt as text, for the reward."""
    row: str
    """The data row as JSON, for the reward."""


class Ack(Message, frozen=True):
    """The learner has taken over what was sent under this lease (or never wants it); the actor forgets it."""

    lease_id: int
    outcome: Literal["accepted", "duplicate", "unknown", "rejected"]
    detail: str = ""


class Cancel(Message, frozen=True):
    """Stop working on these leases; no answer is expected."""

    lease_ids: tuple[int, ...]


class WeightUpdate(Message, frozen=True):
    """Join this membership epoch's collective and receive `policy_version` into the staging buffer."""

    policy_version: int
    epoch: int
    """Names the process group: a member of an older epoch cannot touch a newer one."""
    rank: int
    world_size: int
    store_host: str
    store_port: int
    backend: Literal["gloo", "nccl"]
    bucket_bytes: int
    """Size of one broadcast: with another one at either end the transfer ends well, with the wrong bytes."""
    timeout_s: float


class LearnerHeartbeat(Message, frozen=True):
    """The answer to `ActorHeartbeat`."""

    policy_version: int


class Stop(Message, frozen=True):
    """The run is over; the actor leaves."""

    reason: str


LearnerMessage = Welcome | Refused | Unknown | Lease | Ack | Cancel | WeightUpdate | LearnerHeartbeat | Stop
