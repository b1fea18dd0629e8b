"""Parts of messages: an engine's description, the run as an actor that joins receives it, and reports to operators.

An actor without settings and model gets both from the learner as one blob, sent in parts: never code, never weights. Names of
files have no folder, and only the endings of a model's small files.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from offbeat.protocols.fields import FreeText, Label, Natural, NaturalOrNone, PartName


class MemberStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One live actor, for the operator."""

    name: str
    state: Literal["working", "new", "quarantined", "unreachable"]
    """`new`: it has no weights of this learner process yet."""
    policy_version: NaturalOrNone
    num_leases: Natural
    capacity: Natural
    tokens_per_s: float
    """Over the seconds between its last two rows in `metrics.jsonl`."""
    last_seen_s: float
    """Seconds since the last message of this actor."""
    engine: str


class SettingChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A setting that was changed during the run; values are TOML."""

    setting: str
    """`section.key`."""
    before: str
    after: str
    who: str
    at: float
    """Seconds since the epoch, by the learner's clock."""
    policy_version: Natural
    """The learner's policy version at the change."""


class Vitals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest optimizer step in a few numbers, and what is not well. A number is None where no step has it."""

    reward: float | None = None
    """Mean reward of the step."""
    lag_mean: float | None = None
    lag_max: float | None = None
    """Policy lag of the step's groups, in optimizer steps."""
    bound: float | None = None
    """`staleness.max_staleness` at the step."""
    step_s: float | None = None
    """Mean seconds of the last steps, waiting included."""
    reward_by_task: dict[PartName, float] = {}
    """Mean reward of each task of the step, where `data.task_field` is set."""
    share_by_task: dict[PartName, float] = {}
    """Share of each task's prompts that is leased, where `data.curriculum` is set."""
    health: tuple[FreeText, ...] = ()
    """A sentence for each health rule that holds, with a hint."""


PART_BYTES = 512 << 10
"""Size of every part but the last. A hub takes frames of at least 1 MB (`hub.max_message_mb`)."""
MAX_PARTS = 512
"""Most parts: 256 MB. The largest tokenizers have some 40 MB."""
MAX_SETTINGS_CHARACTERS = 1 << 20
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.(json|jinja|txt|model)\Z")]


class JoinSettings(msgspec.Struct, frozen=True):
    """Everything that an actor is started with. A newer release may add fields."""

    software: Label
    """The learner's version of offbeat."""
    settings: Annotated[str, Meta(max_length=MAX_SETTINGS_CHARACTERS)]
    """The run's settings as TOML, without those of the learner's machine and without secrets."""
    files: Annotated[dict[FileName, bytes], Meta(max_length=64)]
    """Contents of the model's small files, by name: config, tokenizer, chat template, image processor."""


class JoinSettingsError(ValueError):
    """Bytes that are no join settings; the text says why."""


def encode_join_settings(settings: JoinSettings) -> bytes:
    """Return join settings as bytes; raise `JoinSettingsError` where no actor would take them."""
    content = msgspec.msgpack.encode(settings)
    if len(content) > MAX_PARTS * PART_BYTES:
        raise JoinSettingsError(
            f"the model's small files have {len(content) >> 20} MB, more than {MAX_PARTS * PART_BYTES >> 20}"
        )
    decode_join_settings(content)
    return content


def decode_join_settings(content: bytes | bytearray) -> JoinSettings:
    """Return the join settings in these bytes, with all names and sizes checked."""
    try:
        return msgspec.msgpack.decode(content, type=JoinSettings)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise JoinSettingsError(f"malformed: {error}") from error


class ModelHashes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Short hashes of the parts of a model that must be equal at learner and actor (`common.models.folders.hash_model`).

    Weights are not hashed: the learner sends its own.
    """

    config: Label
    tokenizer: Label
    chat_template: Label


class EngineInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine of an actor. The learner records it, and compares it where a difference would bias training."""

    name: Label
    """`vllm` or `transformers`."""
    version: Label
    dtype: Label
    device: Label
    max_model_len: Natural
    """Longest prompt plus completion, in tokens."""
    hashes: ModelHashes
    gpu: Label | None = None
    """UUID of the engine's first GPU; None without one."""
    quantization: Label = ""
    """The engine's own numbers of fewer bits than `dtype`, such as `fp8 weights, fp8 KV cache`; empty for none."""
    takes_images: bool = False
    """True for an engine that samples from prompts with images."""
    has_weight_files: bool = True
    """False for an engine whose model folder has no weights: it first samples under the learner's."""
    processor: Label = ""
    """Model of the processor that computes, with the instruction sets that choose its kernels."""
