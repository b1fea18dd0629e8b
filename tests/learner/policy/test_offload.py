from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packing import pack

pytestmark = pytest.mark.slow


def make_module(*, offloads: bool) -> CompletionLogprobs:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=40, num_hidden_layers=3, **shape))
    policy.gradient_checkpointing_enable()
    policy.train()
    return CompletionLogprobs(policy, offloads=offloads)


def run(module: CompletionLogprobs) -> tuple[Tensor, list[StorageWeakRef]]:
    """Return the log-probs of a pack, and the storages of the layers' inputs."""
    inputs: list[StorageWeakRef] = []

    def note(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(StorageWeakRef(arguments[0].untyped_storage()))

    hooks = [layer.register_forward_pre_hook(note) for layer in module.policy.model.layers]
    logprobs, _, _ = module(*pack([([1, 2, 3], [[4, 5, 6], [7, 8]])]).inputs, 1.0)
    for hook in hooks:
        hook.remove()
    return logprobs, inputs


def test_layers_inputs_leave_the_device_between_forward_and_backward_and_gradients_stay_the_same() -> None:
    gradients: dict[bool, list[Tensor]] = {}
    for offloads in (False, True):
        module = make_module(offloads=offloads)
        logprobs, inputs = run(module)
        assert [storage.expired() for storage in inputs] == [offloads] * 3
        logprobs.mean().backward()
        gradients[offloads] = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert len(gradients[True]) == len(gradients[False]) > 30
    assert all(torch.equal(one, other) for one, other in zip(gradients[True], gradients[False], strict=True))


def test_pass_without_gradients_keeps_nothing() -> None:
    with torch.no_grad():
        _, inputs = run(make_module(offloads=True))
    assert all(storage.expired() for storage in inputs)
