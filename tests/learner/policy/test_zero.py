from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from offbeat.common.errors import SettingError
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.learner.policy.process_group import join_process_group
from offbeat.learner.policy.zero import MAX_FULL_GRADIENTS, deepspeed_config, full_gradients, gathered_parameters, make_engine
from tests.learner.training.trainer_cases import SGD

pytestmark = pytest.mark.slow


def test_users_deepspeed_settings_are_merged_over_ours():
    train = TrainSection(
        zero_stage=2, max_grad_norm=0.5, deepspeed={"zero_optimization": {"overlap_comm": False}, "dump_state": True}
    )
    config = deepspeed_config(train, "float32")
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert config["gradient_clipping"] == 0.5
    assert config["dump_state"] is True


def test_deepspeed_clips_under_zero_alone():
    for stage in (0, 1, 2, 3):
        assert deepspeed_config(TrainSection(zero_stage=stage), "float32")["gradient_clipping"] == (1.0 if stage else 0.0)


def test_bfloat16_accumulates_gradients_in_float32_at_every_stage():
    for stage, effective in ((0, 1), (1, 1), (2, 2), (3, 3)):
        config = deepspeed_config(TrainSection(zero_stage=stage), "bfloat16")
        assert config["gradient_clipping"] == 1.0
        assert config["zero_optimization"]["stage"] == effective
        assert config["data_types"]["grad_accum_dtype"] == "fp32"


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "train_batch_size", "scheduler", "bf16"])
def test_a_setting_that_has_another_place_is_refused_by_name(name):
    with pytest.raises(SettingError, match=rf"train\.deepspeed\.{name} = 1: another setting decides this. Use "):
        deepspeed_config(TrainSection(deepspeed={name: 1}), "float32")


@pytest.mark.parametrize("bucket_numel", [1, 7, 10**6])
def test_every_parameter_comes_once_and_in_order_whatever_the_bucket(bucket_numel):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    gathered = list(gathered_parameters(model.named_parameters(), bucket_numel=bucket_numel))
    assert [name for name, _ in gathered] == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(weight, model.get_parameter(name)) for name, weight in gathered)


class Stack(nn.Module):
    """A module with more matrices than are read under ZeRO, of different sizes, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [4 + index % 3 for index in range(MAX_FULL_GRADIENTS + 5)]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.layers[1].weight.requires_grad_(False)
        self.head = nn.Module()
        self.head.output_layer = nn.Linear(sizes[-1], 2)

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = layer(states).tanh()
        return cast(nn.Linear, self.head.output_layer)(states)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_full_gradients_are_those_of_all_micro_batches_before_clipping(zero_stage, dtype):
    join_process_group()
    batches = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    plain = Stack().to(batches.dtype).float()
    for batch in batches.float():
        plain(batch).square().sum().backward()

    train = TrainSection(zero_stage=zero_stage, max_grad_norm=1e-3, deepspeed=SGD)
    config = deepspeed_config(train, dtype)
    module = Stack().to(batches.dtype)
    engine = make_engine(cast(Any, module), config, train)
    for index, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary(index == 1)
        engine.backward(engine(batch).float().square().sum())
    stage = config["zero_optimization"]["stage"]
    gradients = {
        name: gradient.float().clone()
        for name, gradient in full_gradients(module.named_parameters(), zero_stage=stage)
        if gradient is not None
    }
    engine.destroy()

    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    matrices = [name for name in trained if name.endswith("weight")]
    assert len(matrices) == MAX_FULL_GRADIENTS + 4
    if stage == 0:
        assert list(gradients) == trained
    else:
        assert len(gradients) == MAX_FULL_GRADIENTS
        assert [name for name in matrices if name in gradients] == list(gradients)
        # Evenly over the model: never two neighbors left out.
        assert all(one in gradients or other in gradients for one, other in pairwise(matrices))
    for name, gradient in gradients.items():
        expected = plain.get_parameter(name).grad
        assert expected is not None
        # bfloat16 keeps 8 bits of every product.
        tolerance = (1e-6 if dtype == "float32" else 0.05) * expected.abs().max().item()
        torch.testing.assert_close(gradient, expected, rtol=0, atol=tolerance)


def test_few_parameters_are_all_read_and_huge_ones_never(monkeypatch):
    monkeypatch.setattr("offbeat.learner.policy.zero.GATHER_BUCKET_NUMEL", 20)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 6), nn.Linear(6, 2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert [name for name, _ in full_gradients(model.named_parameters(), zero_stage=1)] == ["0.weight", "2.weight"]
