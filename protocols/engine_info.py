"""The description of an actor's engine in its hello."""

import msgspec

from offbeat.protocols.fields import Label, Natural


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
    """UUID of the engine's first GPU; None without one. Since minor version 4."""
    quantization: Label = ""
    """The engine's own numbers of fewer bits than `dtype`, such as `fp8 weights, fp8 KV cache`; empty for none. Since minor
    version 5."""
    takes_images: bool = False
    """True for an engine that samples from prompts with images. Since minor version 7."""
    has_weight_files: bool = True
    """False for an engine whose model folder has no weights: it first samples under the learner's. Since minor version 8."""
    processor: Label = ""
    """Model of the processor that computes, with the instruction sets that choose its kernels. Since minor version 10."""
