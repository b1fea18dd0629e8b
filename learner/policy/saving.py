"""The policy on disk, as transformers reads it, and its adapter as peft does."""

import shutil
from pathlib import Path

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from offbeat.common.models.folders import PROCESSOR_FILE, resolve_model
from offbeat.learner.policy.lora import merged_parameters


def gather_policy(policy: PreTrainedModel, *, is_keeper: bool) -> dict[str, Tensor]:
    """Return the weights as transformers names them, adapters merged, in CPU memory; empty on ranks that do not keep them.

    A collective under ZeRO-3: every rank calls, and only the keeper holds the whole model.
    """
    state: dict[str, Tensor] = {}
    for name, weight in merged_parameters(policy):
        if is_keeper:
            # Copied one by one: ZeRO's parameters are views into one storage, which would be saved whole for each.
            state[name] = weight.to("cpu", copy=True)
    if is_keeper:
        persistent = policy.state_dict().keys()
        state |= {name: buffer.cpu() for name, buffer in policy.named_buffers() if name in persistent}
    return state


def write_policy(policy: PreTrainedModel, state: dict[str, Tensor], folder: Path, *, tokenizer: str) -> None:
    """Write gathered weights, config and tokenizer to `folder`; `tokenizer` is the folder or hub name to copy it from."""
    policy.save_pretrained(folder, state_dict=state)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    processor = resolve_model(tokenizer) / PROCESSOR_FILE
    if processor.is_file():
        shutil.copy(processor, folder)
