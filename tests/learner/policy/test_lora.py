"""The adapter with real models and real peft; tests that train use real DeepSpeed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from offbeat.common.errors import SettingError
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.lora import add_adapter, base_shapes, merged_parameters, with_merged_weights, without_adapter
from offbeat.learner.policy.packing import pack
from offbeat.learner.policy.process_group import join_process_group
from offbeat.learner.policy.zero import deepspeed_config, make_engine
from tests.families import make_family
from tests.learner.training.trainer_cases import SGD, make_config

pytestmark = pytest.mark.slow

RANK, ALPHA = 4, 12.0
SCALE = 3.0
"""`ALPHA / RANK`."""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a dense layer."""

PACK = pack([([5, 9], [[6, 6, 40, 7], [4]]), ([8], [[30, 31, 12]])])
"""Eight completion tokens."""


@pytest.fixture(params=["tiny_model", "tiny_untied_model", "tiny_moe_model"])
def model(request):
    """The folder of a model with tied embeddings, with an untied head, or with experts."""
    return request.getfixturevalue(request.param)


def load(folder, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def load_adapted(folder, *target_modules: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    policy = load(folder, dtype)
    torch.manual_seed(0)
    add_adapter(policy, rank=RANK, alpha=ALPHA, target_modules=target_modules)
    return policy


def fill_adapter(policy: PreTrainedModel) -> None:
    """Give the adapter a random B: with its initial B of 0 it has no effect."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.05, generator=generator)


def adapted_layers(policy: PreTrainedModel) -> list[str]:
    return [name.removesuffix(".lora_A.default.weight") for name, _ in policy.named_parameters() if ".lora_A." in name]


def low_high(policy: PreTrainedModel, layer: str) -> tuple[Tensor, Tensor]:
    """Return copies of A `[rank, in_features]` and B `[out_features, rank]`."""
    parameters = (policy.get_parameter(f"{layer}.lora_{letter}.default.weight") for letter in "AB")
    low, high = (parameter.detach().clone() for parameter in parameters)
    return low, high


def copies(policy: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in merged_parameters(policy)}


def logprobs_of(module) -> Tensor:
    """Return log-probs from a `CompletionLogprobs`, or from the engine around it."""
    logprobs, *_ = module(PACK.token_ids, PACK.position_ids, PACK.predictors, PACK.targets, PACK.spans, 1.0)
    return logprobs


def logprobs(policy: PreTrainedModel) -> Tensor:
    return logprobs_of(CompletionLogprobs(policy))


def loss(policy_logprobs: Tensor) -> Tensor:
    return -(policy_logprobs * torch.linspace(1.0, -0.5, 8)).sum()


@contextmanager
def engine_of(policy: PreTrainedModel, *, zero_stage: int) -> Iterator:
    join_process_group()
    train = make_config(Path(str(policy.name_or_path)), zero_stage=zero_stage, deepspeed=SGD, max_grad_norm=1e9).train
    engine = make_engine(CompletionLogprobs(policy), deepspeed_config(train, "float32"), train)
    for param_group in engine.optimizer.param_groups:
        param_group["lr"] = 0.1
    try:
        yield engine
    finally:
        engine.destroy()


def train_step(engine) -> None:
    engine.backward(loss(logprobs_of(engine)))
    engine.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_new_adapter_leaves_names_order_shapes_and_every_bit_of_the_weights(model, dtype):
    plain = dict(load(model, dtype).named_parameters())
    policy = load_adapted(model, dtype=dtype)
    assert base_shapes(policy) == [(name, tuple(parameter.shape)) for name, parameter in plain.items()]
    merged = copies(policy)
    assert list(merged) == list(plain)
    assert all(weight.dtype == dtype and torch.equal(weight, plain[name]) for name, weight in merged.items())


def test_a_policy_without_an_adapter_is_published_as_it_is(model):
    policy = load(model)
    parameters = dict(policy.named_parameters())
    assert base_shapes(policy) == [(name, tuple(parameter.shape)) for name, parameter in parameters.items()]
    merged = dict(merged_parameters(policy))
    assert merged.keys() == parameters.keys()
    assert all(weight.data_ptr() == parameters[name].data_ptr() for name, weight in merged.items()), "no copies"


def test_every_linear_layer_but_the_head_is_adapted_and_the_rest_frozen(tiny_untied_model):
    policy = load_adapted(tiny_untied_model)
    blocks = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
    expected = [f"model.layers.{index}.{blocks.get(name, 'mlp')}.{name}" for index in range(2) for name in LINEAR]
    assert adapted_layers(policy) == expected
    assert type(policy.get_output_embeddings()) is nn.Linear
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in policy.named_parameters())


def test_of_experts_only_the_attention_is_adapted(tiny_moe_model):
    names = {layer.rpartition(".")[2] for layer in adapted_layers(load_adapted(tiny_moe_model))}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_routers_of_a_class_made_of_a_linear_layer_are_not_adapted(tmp_path, tiny_model):
    make_family(tmp_path, "Llama 4", tiny_model)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path)
    add_adapter(policy, rank=2, alpha=4.0, target_modules=())
    adapted = [name for name, _ in policy.named_parameters() if "lora_A" in name]
    assert any("shared_expert" in name for name in adapted)
    assert not any("router" in name for name in adapted)


def test_a_shared_expert_is_adapted_without_those_beside_it():
    """peft recognizes this architecture: it would adapt the experts' `down_proj` and not the shared expert's."""
    config = Qwen2MoeConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=2,
        num_experts_per_tok=1, intermediate_size=8, moe_intermediate_size=8, shared_expert_intermediate_size=8,
    )  # fmt: skip
    policy = Qwen2MoeForCausalLM(config)
    add_adapter(policy, rank=2, alpha=2.0, target_modules=("down_proj",))
    assert adapted_layers(policy) == ["model.layers.0.mlp.shared_expert.down_proj"]


@pytest.mark.parametrize(
    ("target_modules", "expected"),
    [
        (("q_proj",), {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}),
        (("mlp.up_proj", "model.layers.0.self_attn.v_proj"), {f"model.layers.{layer}.mlp.up_proj" for layer in (0, 1)}
         | {"model.layers.0.self_attn.v_proj"}),
    ],
)  # fmt: skip
def test_layers_are_named_from_the_end_or_whole(tiny_model, target_modules, expected):
    assert set(adapted_layers(load_adapted(tiny_model, *target_modules))) == expected


@pytest.mark.parametrize("wrong", ["proj", "lm_head", "embed_tokens", "mlp", "model.layers.2.self_attn.q_proj"])
def test_a_name_that_fits_no_linear_layer_is_refused_with_those_that_there_are(tiny_untied_model, wrong):
    with pytest.raises(
        SettingError, match=rf"lora\.target_modules = .*'{wrong}' fits .* There are: down_proj, gate_proj, k_proj"
    ):
        load_adapted(tiny_untied_model, "q_proj", wrong)


@pytest.mark.parametrize("wrong", ["experts", "gate", "gate_up_proj", "down_proj"])
def test_router_and_experts_are_no_linear_layers(tiny_moe_model, wrong):
    with pytest.raises(
        SettingError, match=rf"'{wrong}' fits no linear layer of the model\. There are: k_proj, o_proj, q_proj, v_proj"
    ):
        load_adapted(tiny_moe_model, wrong)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_the_first_step_moves_b_by_the_gradient_of_the_merged_weight_times_a(tiny_model, zero_stage):
    """`dL/dB = scale * dL/dW @ A.T`, and `dL/dA = scale * B.T @ dL/dW` is 0 where B is."""
    plain = load(tiny_model)
    loss(logprobs(plain)).backward()
    policy = load_adapted(tiny_model)
    before = {layer: low_high(policy, layer) for layer in adapted_layers(policy)}
    with engine_of(policy, zero_stage=zero_stage) as engine:
        train_step(engine)
        for layer, (low, _) in before.items():
            gradient = plain.get_parameter(f"{layer}.weight").grad
            assert gradient is not None
            new_low, new_high = low_high(policy, layer)
            assert torch.equal(new_low, low), layer
            torch.testing.assert_close(new_high, -0.1 * SCALE * gradient @ low.T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("fixture", "zero_stage"),
    [("tiny_model", 0), ("tiny_model", 1), ("tiny_model", 2), ("tiny_untied_model", 1), ("tiny_moe_model", 2)],
)
def test_training_moves_the_weights_by_scale_times_b_a_and_nothing_else(fixture, zero_stage, request):
    model = request.getfixturevalue(fixture)
    base = {name: parameter.detach().clone() for name, parameter in load(model).named_parameters()}
    policy = load_adapted(model)
    first = {layer: low_high(policy, layer) for layer in adapted_layers(policy)}
    with engine_of(policy, zero_stage=zero_stage) as engine:
        for _ in range(3):
            train_step(engine)
        merged = copies(policy)
        deltas = {}
        for layer in first:
            low, high = low_high(policy, layer)
            assert not torch.equal(low, first[layer][0]), layer
            deltas[f"{layer}.weight"] = SCALE * high.double() @ low.double()
        frozen = {name: weight for name, weight in policy.named_parameters() if ".lora_" not in name}
    assert all(torch.equal(weight, base[name.replace(".base_layer", "")]) for name, weight in frozen.items())
    for name, weight in merged.items():
        if name in deltas:
            assert deltas[name].abs().max() > 1e-3, name
            torch.testing.assert_close(weight.double() - base[name], deltas[name], rtol=0, atol=1e-7)
        else:
            assert torch.equal(weight, base[name]), name


def test_a_model_with_the_merged_weights_has_the_adapted_policys_logprobs(model):
    policy, plain = load_adapted(model), load(model)
    fill_adapter(policy)
    with torch.no_grad():
        adapted, base = logprobs(policy), logprobs(plain)
        for name, weight in merged_parameters(policy):
            plain.get_parameter(name).copy_(weight)
        torch.testing.assert_close(logprobs(plain), adapted, rtol=0, atol=1e-5)
    assert (adapted - base).abs().max() > 1e-2


def test_with_its_merged_weights_the_policy_is_a_model_of_them_to_the_bit_in_bfloat16(model):
    policy, plain = load_adapted(model, dtype=torch.bfloat16), load(model, torch.bfloat16)
    fill_adapter(policy)
    with torch.no_grad():
        for name, weight in merged_parameters(policy):
            plain.get_parameter(name).copy_(weight)
        adapted = logprobs(policy)
        with with_merged_weights(policy):
            assert torch.equal(logprobs(policy), logprobs(plain))
        assert torch.equal(logprobs(policy), adapted)
    assert not torch.equal(logprobs(plain), adapted), "rounding the merged weights can be seen"


def test_merging_adds_in_float32_and_rounds_once(tiny_model):
    """Above 1 bfloat16 numbers are 2^-7 apart, and a sum halfway between two is rounded to the even one, here 1."""
    policy = load(tiny_model, torch.bfloat16)
    add_adapter(policy, rank=2, alpha=4.0, target_modules=("q_proj",))
    layer = policy.get_submodule("model.layers.0.self_attn.q_proj")
    low, high, weight = (layer.get_parameter(f"{name}.weight") for name in ("lora_A.default", "lora_B.default", "base_layer"))
    with torch.no_grad():
        weight.fill_(1.0)
        high.fill_(1.0)
        low.zero_()[0, :4] = torch.tensor([2**-10, 2**-8, 2**-9, 2**-9])
        low[1, 3] = 2**-18
    # 1 + 2 * (2^-10, 2^-8, 2^-9, 2^-9 + 2^-18): nearer to 1, at the next number, half-way, and a little further. That
    # little is lost where 2^-9 + 2^-18 is made a bfloat16 before it is added.
    merged = copies(policy)["model.layers.0.self_attn.q_proj.weight"]
    assert merged[:, :5].unique(dim=0).float().tolist() == [[1.0, 1.0078125, 1.0, 1.0078125, 1.0]]


def test_the_merged_state_is_saved_and_loaded_as_a_plain_model(model, tmp_path):
    policy = load_adapted(model)
    fill_adapter(policy)
    merged = copies(policy)
    policy.save_pretrained(tmp_path, state_dict=merged)
    loaded = dict(load(tmp_path).named_parameters())
    assert list(loaded) == list(merged)
    assert all(torch.equal(loaded[name], weight) for name, weight in merged.items())


def test_without_its_adapter_the_policy_is_the_base_to_the_bit_and_afterwards_itself_again(model):
    policy, plain = load_adapted(model), load(model)
    fill_adapter(policy)
    with torch.no_grad():
        adapted = logprobs(policy)
        with without_adapter(policy):
            assert torch.equal(logprobs(policy), logprobs(plain))
        assert torch.equal(logprobs(policy), adapted)
    assert not torch.equal(adapted, logprobs(plain))


def test_the_adapter_is_back_after_an_exception(tiny_model):
    policy = load_adapted(tiny_model)
    fill_adapter(policy)
    adapted = logprobs(policy)
    with pytest.raises(KeyError), without_adapter(policy):
        raise KeyError
    assert torch.equal(logprobs(policy), adapted)
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in policy.named_parameters())


def test_a_policy_without_an_adapter_is_no_reference_for_itself(tiny_model):
    with pytest.raises(ValueError, match="no adapter"), without_adapter(load(tiny_model)):
        pass


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_the_reference_between_forward_and_backward_changes_no_gradient(tiny_model, zero_stage):
    results = []
    for with_reference in (False, True):
        policy = load_adapted(tiny_model)
        fill_adapter(policy)
        with engine_of(policy, zero_stage=zero_stage) as engine:
            for _ in range(2):
                policy_logprobs = logprobs_of(engine)
                if with_reference:
                    with torch.no_grad(), without_adapter(policy):
                        logprobs_of(engine.module)
                engine.backward(loss(policy_logprobs))
                engine.step()
            results.append(copies(policy))
    expected, weights = results
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_activation_checkpointing_keeps_the_adapters_gradients_though_the_embedding_is_frozen(tiny_model):
    results = []
    for checkpointing in (False, True):
        policy = load(tiny_model)
        if checkpointing:
            policy.gradient_checkpointing_enable()
            policy.train()
        torch.manual_seed(0)
        add_adapter(policy, rank=RANK, alpha=ALPHA, target_modules=())
        fill_adapter(policy)
        calls = []
        policy.get_submodule("model.layers.0.self_attn").register_forward_hook(lambda *_, calls=calls: calls.append(1))
        loss(logprobs(policy)).backward()
        gradients = {name: parameter.grad for name, parameter in policy.named_parameters() if ".lora_" in name}
        results.append((len(calls), gradients))
    (num_kept, expected), (num_recomputed, gradients) = results
    assert (num_kept, num_recomputed) == (1, 2)
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in expected.values())
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
