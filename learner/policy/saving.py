"""The policy on disk, as transformers reads it."""

from pathlib import Path

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from offbeat.learner.policy.lora import merged_parameters


def save_policy(policy: PreTrainedModel, folder: Path, *, tokenizer: str, is_writer: bool) -> None:
    """Write weights, config and tokenizer to `folder`; `tokenizer` is the folder or hub name to copy it from.

    A collective under ZeRO-3: every rank calls, and only the writer holds the whole model and writes.
    """
    state: dict[str, Tensor] = {}
    for name, weight in merged_parameters(policy):
        if is_writer:
            # Copied one by one: ZeRO's parameters are views into one storage, which would be saved whole for each.
            state[name] = weight.to("cpu", copy=True)
    if not is_writer:
        return
    persistent = policy.state_dict().keys()
    state |= {name: buffer.cpu() for name, buffer in policy.named_buffers() if name in persistent}
    policy.save_pretrained(folder, state_dict=state)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
