"""The learner's module at the shapes of an 8B model, on tensors without data, against the device plan."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat.common.settings.config import Config, LaunchSection, ModelSection, TrainSection
from offbeat.common.settings.learning_sections import AdvantageSection, CriticSection, KlSection, LoraSection
from offbeat.common.weights.flat import tensor_dtype
from offbeat.deploy.local.memory import learner_need, offloaded_bytes
from offbeat.deploy.local.model_sizes import sizes_of
from offbeat.learner.policy import logprobs, packed_attention
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packing import pack
from tests.deploy.local.machines import QWEN3_8B, QWEN3_600M
from tests.live_bytes import LiveBytes

META = torch.device("meta")
NUM_TOKENS = 8192


def make_module(num_layers: int, *, checkpointing: bool, offloads: bool = False) -> CompletionLogprobs:
    """Return the module as `load_policy` makes it, whose gradients are taken away at once, as ZeRO does."""
    config = Qwen3Config.from_dict({**QWEN3_8B, "num_hidden_layers": num_layers})
    with META:
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if checkpointing:
        policy.gradient_checkpointing_enable()
        for layer in policy.modules():
            layer.training = isinstance(layer, GradientCheckpointingLayer)

    def take_away(parameter: torch.Tensor) -> None:
        parameter.grad = None

    module = CompletionLogprobs(policy, offloads=offloads)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(take_away)
    return module


def most_bytes(module: CompletionLogprobs) -> int:
    """Return the most bytes of a micro-batch's forward and backward pass at once; the parameters stay as they are."""
    completion = [1] * ((NUM_TOKENS - 256) // 8)
    packed = pack([([1] * 256, [completion] * 8)]).to(META)
    with LiveBytes("meta") as live:
        scores, entropies, _ = module(*packed.inputs, 1.0)
        assert entropies is not None
        (scores.sum() + entropies.sum()).backward()
        assert live.now < live.most / 1000, "nothing is kept when the micro-batch is over"
        return live.most


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "checkpointing", "least", "most"), [(6, False, 0.78, 0.9), (36, True, 0.5, 0.58)])
def test_activations_in_the_device_plan_hold_those_of_an_8b_model(
    num_layers: int, checkpointing: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU: one call of flash attention for all spans.
    monkeypatch.setattr(packed_attention.PlacedSpans, "is_in_line", lambda spans, dtype: True)
    module = make_module(num_layers, checkpointing=checkpointing)
    measured = most_bytes(module)
    sizes = sizes_of({**QWEN3_8B, "num_hidden_layers": num_layers})
    assert sum(parameter.numel() for parameter in module.parameters()) == sizes.num_parameters
    train = TrainSection(micro_batch_tokens=NUM_TOKENS, activation_checkpointing=checkpointing, zero_stage=3)
    need = learner_need(Config(model=ModelSection(path="m", max_length=16), train=train), sizes)
    planned = next(part.num_bytes for part in need.parts if part.name in ("activations", "optimizer step"))
    # The rest is for fragments: a second layer for the backward pass, and under ZeRO-3 the whole head beside other weights.
    assert least <= measured / planned <= most


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_offloaded_activations_in_the_device_plan_are_the_pinned_blocks_of_a_pass(
    dtype: Literal["bfloat16", "float32"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention.PlacedSpans, "is_in_line", lambda spans, dtype: True)
    blocks: list[int] = []

    def to_host(tensor: torch.Tensor) -> logprobs.Packed:
        if tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
            blocks.append(1 << (tensor.nbytes - 1).bit_length())
        return tensor

    monkeypatch.setattr(logprobs, "_to_host", to_host)
    module = make_module(3, checkpointing=True, offloads=True).to(tensor_dtype(dtype))
    module(*pack([([1] * 256, [[1] * 3000])]).to(META).inputs, 1.0)
    train = TrainSection(micro_batch_tokens=3255, activation_checkpointing="offload")
    config = Config(model=ModelSection(path="m", max_length=16, dtype=dtype), train=train)
    planned = offloaded_bytes(config, sizes_of({**QWEN3_8B, "num_hidden_layers": 3}))
    # Two numbers for each token are not in the sum.
    assert planned <= sum(blocks) <= 1.01 * planned


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_critic_of_its_own_takes_as_much_memory_as_the_policy(zero_stage: int) -> None:
    sizes, train = sizes_of(QWEN3_8B), TrainSection(zero_stage=zero_stage)
    advantage = AdvantageSection(baseline="critic")
    launch = LaunchSection(learner_processes=4)
    shared = Config(train=train, advantage=advantage, launch=launch)
    own = Config(train=train, advantage=advantage, critic=CriticSection(trunk="own"), launch=launch)
    before, after = ({part.name: part.num_bytes for part in learner_need(one, sizes).parts} for one in (shared, own))
    for name in ("optimizer", "gradients"):
        assert after[name] == pytest.approx(2 * before[name])
    assert after["weights"] - before["weights"] == pytest.approx(2 * sizes.num_parameters / (4 if zero_stage == 3 else 1))


@pytest.mark.parametrize(("rank", "reference", "num_models"), [(0, "", 1), (8, "", 0), (8, "another", 1)])
def test_reference_of_the_kl_takes_memory_unless_it_is_the_policy_without_its_adapter(
    rank: int, reference: str, num_models: int
) -> None:
    sizes, lora = sizes_of(QWEN3_8B), LoraSection(rank=rank)
    kl = KlSection(loss_coef=0.1, reference=reference)
    before, after = (learner_need(one, sizes).parts[0] for one in (Config(lora=lora), Config(lora=lora, kl=kl)))
    assert (before.name, after.name) == ("weights", "weights")
    assert after.num_bytes - before.num_bytes == num_models * 2 * sizes.num_parameters


def test_another_reference_takes_the_memory_of_its_own_size(tmp_path: Path) -> None:
    policy, larger = sizes_of(QWEN3_600M), sizes_of(QWEN3_8B)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(QWEN3_8B))
    kl = KlSection(loss_coef=0.1, reference=str(tmp_path))
    before, after = (learner_need(one, policy).parts[0] for one in (Config(), Config(kl=kl)))
    assert after.num_bytes - before.num_bytes == 2 * larger.num_parameters
