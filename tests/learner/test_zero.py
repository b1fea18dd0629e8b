import pytest
import torch
from torch import nn

from common.config import TrainSection
from learner.zero import deepspeed_config, gathered_parameters


def test_users_deepspeed_settings_are_merged_over_ours():
    train = TrainSection(
        zero_stage=2, max_grad_norm=0.5, deepspeed={"zero_optimization": {"overlap_comm": False}, "dump_state": True}
    )
    config = deepspeed_config(train, "float32")
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert config["gradient_clipping"] == 0.5
    assert config["dump_state"] is True


def test_bfloat16_accumulates_gradients_in_float32_at_every_stage():
    for stage, effective in ((0, 1), (1, 1), (2, 2), (3, 3)):
        config = deepspeed_config(TrainSection(zero_stage=stage), "bfloat16")
        assert config["zero_optimization"]["stage"] == effective
        assert config["data_types"]["grad_accum_dtype"] == "fp32"


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "train_batch_size", "scheduler", "bf16"])
def test_a_setting_that_has_another_place_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"train.deepspeed: '{name}' cannot be set there; use "):
        deepspeed_config(TrainSection(deepspeed={name: 1}), "float32")


@pytest.mark.parametrize("bucket_numel", [1, 7, 10**6])
def test_every_parameter_comes_once_and_in_order_whatever_the_bucket(bucket_numel):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    gathered = list(gathered_parameters(model.named_parameters(), bucket_numel=bucket_numel))
    assert [name for name, _ in gathered] == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(weight, model.get_parameter(name)) for name, weight in gathered)
