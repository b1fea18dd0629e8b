"""The conditions under which an actor may work for a run."""

from typing import NamedTuple

import numpy as np

from offbeat.protocols.messages import Hello, ModelHashes, TensorSpec


class Contract(NamedTuple):
    """The learner's side of the hello."""

    run_id: str
    learner_incarnation: int
    """Random, different for each learner process."""
    layout: tuple[TensorSpec, ...]
    """The flat weight buffer, in order."""
    canary_token_ids: np.ndarray
    """int32 `[num_tokens]`."""
    dtype: str
    """torch dtype of the weights without its prefix: `float32`, `bfloat16`."""
    hashes: ModelHashes
    max_length: int
    """Longest prompt plus completion of this run, in tokens."""
    vocabulary_size: int
    temperature: float
    reward: str
    """`task.reward`."""
    software: str
    """Version of offbeat."""
    max_message_bytes: int


def objection(contract: Contract, hello: Hello) -> str | None:
    """Return the reason why this actor would bias or break the run, with the cure; None for an actor that fits."""
    engine = hello.engine
    if hello.run_id not in ("", contract.run_id):
        return (
            f"the actor worked for run {hello.run_id}, and here is run {contract.run_id}: start the actor anew, or give it the "
            "hub.address of its own run"
        )
    for what, theirs, ours in (
        ("model config", engine.hashes.config, contract.hashes.config),
        ("tokenizer", engine.hashes.tokenizer, contract.hashes.tokenizer),
        ("chat template", engine.hashes.chat_template, contract.hashes.chat_template),
    ):
        if theirs != ours:
            return (
                f"the actor's {what} differs from the learner's ({theirs}, not {ours}): give both the same model.path contents"
            )
    for setting, theirs, ours in (
        ("model.dtype", engine.dtype, contract.dtype),
        ("rollout.temperature", hello.temperature, contract.temperature),
        ("task.reward", hello.reward, contract.reward),
    ):
        if theirs != ours:
            return f"the actor's {setting} is {theirs}, the learner's {ours}: give both the same config"
    if engine.max_model_len < contract.max_length:
        return (
            f"the actor's engine takes {engine.max_model_len} tokens, the run needs {contract.max_length}: give both the same "
            "model.max_length"
        )
    return None


def differences(contract: Contract, hello: Hello) -> list[str]:
    """Return the harmless differences between actor and learner, which explain results that are compared later."""
    found = []
    if hello.software != contract.software:
        found.append(f"offbeat {hello.software}, the learner has {contract.software}")
    if hello.engine.max_model_len > contract.max_length:
        found.append(f"its engine takes {hello.engine.max_model_len} tokens, the run needs {contract.max_length}")
    return found
