"""One message of every type, with its arrays, and the frames that tests make of messages."""

import msgspec
import numpy as np

from offbeat.protocols.message_parts import EngineInfo, ModelHashes
from offbeat.protocols.messages import (
    PROTOCOL_MINOR,
    Ack,
    ActorHeartbeat,
    ActorMessage,
    ActorStats,
    CanaryRouted,
    CanaryScored,
    Cancel,
    Chunk,
    ChunkGone,
    ChunkRequest,
    Credit,
    CreditLimit,
    FilesScored,
    Goodbye,
    GroupDone,
    Hello,
    LearnerHeartbeat,
    LearnerMessage,
    Lease,
    LeaseFailed,
    LiveSettingsReport,
    LiveSettingsRequest,
    MemberStatus,
    Refused,
    RewardTrouble,
    RunPart,
    RunRequest,
    Sampling,
    SayHello,
    SettingChange,
    StatusReport,
    StatusRequest,
    Stop,
    TensorSpec,
    Vitals,
    WeightPull,
    WeightsCommitted,
    WeightsStaged,
    WeightUpdate,
    Welcome,
)
from offbeat.protocols.payload import CompletionMeta, ImageReference, Segment
from offbeat.protocols.wire import MAGIC, Array, Frame, encode

NEWER = MAGIC[:-1] + bytes([PROTOCOL_MINOR + 1])
"""First frame of a peer whose minor version is one newer."""
INTS = np.arange(-2, 5, dtype=np.int32)
FLOATS = np.array([-0.0, -1.5, np.nan, -np.inf], dtype=np.float32)
BYTES = np.arange(7, dtype=np.uint8)

ENGINE = EngineInfo("vllm", "0.32.0", "bfloat16", "cpu", 4096, ModelHashes("01234567", "89abcdef", ""))
STATS = ActorStats(num_generated_tokens=9, num_groups_sent=1, num_running_completions=2, seconds={"generate": 1.5})
WELCOME = Welcome(
    run_id="r",
    learner_incarnation=7,
    max_message_bytes=1 << 28,
    layout=(TensorSpec("lm_head.weight", (3, 4), "float32"), TensorSpec("b", (), "bfloat16")),
    policy_version=2,
)
LEASE = Lease(
    lease_id=1 << 60,
    prompt_id=5,
    group_size=8,
    sampling=Sampling(max_new_tokens=16, temperature=0.0),
    min_policy_version=3,
    timeout_s=600.0,
    prompt="1+1=",
    row='{"answer": "2"}',
)
GROUP = GroupDone(
    lease_id=1,
    completions=(
        CompletionMeta(3, "stop", 1.0, (Segment(4, 0),)),
        # The learner restarted from a checkpoint during the completion, so the versions fall.
        CompletionMeta(4, "length", -0.5, (Segment(4, 0), Segment(5, 1), Segment(2, 3)), {"format": 0.5, "right": -1.0}),
    ),
    generate_s=0.25,
    reward_s=0.125,
)
CHANGE = SettingChange("staleness.max_staleness", "4", "8", "me@host", 1e9, 3)
STATUS = StatusReport(
    run_id="r",
    policy_version=3,
    num_steps=10,
    published_version=3,
    doing="training",
    doing_s=1.5,
    waiting_for="",
    uptime_s=60.0,
    members=(MemberStatus("actor-0", "working", 3, 2, 16, 1000.5, 0.1, "vllm 0.32.0"),),
    ledger={"leased": 3, "dropped/stale": 1},
    num_ready=1,
    num_generating=2,
    epoch=0,
    epoch_position=0.5,
    log_bytes=1 << 40,
    problems=("the log is full",),
    rejected={"actor-0: too many frames": 1},
    changed_settings=(CHANGE,),
    vitals=Vitals(
        reward=0.5,
        lag_mean=1.5,
        lag_max=3.0,
        bound=4.0,
        step_s=2.5,
        reward_by_task={"sums": 0.5},
        share_by_task={"sums": 0.5},
        health=("no signal",),
    ),
    actors_wanted=8,
)

FROM_ACTOR: list[tuple[ActorMessage, tuple[Array, ...]]] = [
    (
        Hello(
            actor="actor-0",
            incarnation=2**63,
            engine=ENGINE,
            temperature=1.0,
            reward="my_rewards:solved",
            software="0.1.0",
            run_id="r",
            lease_ids=(1, 1 << 60),
            sources={"my_rewards.py": "0123456789abcdef"},
        ),
        (),
    ),
    (Credit(capacity=16), ()),
    (GROUP, (INTS, INTS.astype(np.float32))),
    (LeaseFailed(lease_id=3, reason="reward_error", detail="ZeroDivisionError"), ()),
    (ActorHeartbeat(policy_version=-1, stats=STATS, lease_ids=(), seen_lease_id=-1), ()),
    (
        ActorHeartbeat(
            policy_version=3,
            stats=STATS,
            lease_ids=(1, 2),
            seen_lease_id=2,
            reward_trouble=RewardTrouble(waiting_s=2.5, problem="503", lease_ids=(1,)),
        ),
        (),
    ),
    (WeightsStaged(policy_version=4, epoch=-1, error="bucket 3 of 9: closed"), ()),
    (WeightsCommitted(policy_version=4, stall_s=0.25), ()),
    (CanaryScored(policy_version=3), (FLOATS,)),
    (FilesScored(), (FLOATS,)),
    (CanaryRouted(policy_version=3, num_tokens=2, num_layers=3, top_k=2), (np.arange(12, dtype=np.int32),)),
    (Goodbye(reason="SIGTERM"), ()),
    (ChunkRequest(policy_version=4, index=0), ()),
    (ChunkRequest(policy_version=4, index=0, base=(1 << 64) - 1), ()),
    (RunRequest(index=3), ()),
    (StatusRequest(), ()),
    (LiveSettingsRequest(settings={"staleness.max_staleness": "8", "train.learning_rate": "1e-4"}, who="me@host"), ()),
]
FROM_LEARNER: list[tuple[LearnerMessage, tuple[Array, ...]]] = [
    (WELCOME, (INTS,)),
    (Refused(reason="another dtype"), ()),
    (SayHello(), ()),
    (LEASE, (INTS,)),
    (msgspec.structs.replace(LEASE, images=(ImageReference(3, 1 << 63), ImageReference(4, 5))), (INTS, BYTES)),
    (Ack(lease_id=3, outcome="duplicate"), ()),
    (Cancel(lease_ids=(1, 2)), ()),
    (CreditLimit(capacity=3), ()),
    (
        WeightUpdate(
            policy_version=4,
            epoch=2,
            rank=1,
            world_size=3,
            store_host="127.0.0.1",
            store_port=29500,
            backend="gloo",
            bucket_bytes=1 << 23,
            checksum=(1 << 64) - 1,
            timeout_s=60.0,
        ),
        (),
    ),
    (
        WeightPull(
            policy_version=4,
            host="127.0.0.1",
            port=5701,
            num_bytes=1 << 34,
            chunk_bytes=1 << 23,
            checksum=(1 << 64) - 1,
            timeout_s=60.0,
            bases=(0, (1 << 64) - 1),
        ),
        (),
    ),
    (Chunk(policy_version=4, index=0, checksum=(1 << 64) - 1), (BYTES,)),
    (Chunk(policy_version=4, index=0, checksum=0, base=7), (BYTES,)),
    (ChunkGone(policy_version=4, index=0), ()),
    (RunPart(index=0, num_parts=1, digest="0123"), (BYTES,)),
    (LearnerHeartbeat(newest_lease_id=-1), ()),
    (Stop(reason="finished"), ()),
    (STATUS, ()),
    (LiveSettingsReport(policy_version=3, error="no", changed=(CHANGE,), warnings=("narrow",)), ()),
]


def as_sent(frames: list[Frame]) -> list[bytes]:
    """Return the frames as a socket delivers them."""
    return [bytes(frame) for frame in frames]


def group_frames(*completions: CompletionMeta, num_ids: int, num_logprobs: int) -> list[Frame]:
    done = GroupDone(lease_id=1, completions=completions, generate_s=0.0)
    return encode(done, np.zeros(num_ids, np.int32), np.zeros(num_logprobs, np.float32))


def routed(num_tokens: int, num_layers: int, top_k: int) -> CanaryRouted:
    return CanaryRouted(policy_version=1, num_tokens=num_tokens, num_layers=num_layers, top_k=top_k)


def name_of(value: object) -> str:
    return type(value).__name__ if not isinstance(value, tuple) else ""
