"""Routing replay: forced experts are chosen, the current logits weigh them, and gradients go through the weights."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat.common.errors import SettingError
from offbeat.common.models.routing import record_routing, routers
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packing import pack
from offbeat.learner.policy.process_group import join_process_group
from offbeat.learner.policy.routing_replay import make_replay

TOKENS = pack([([4, 5], [[6, 7, 8, 9], [10, 11]])])

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 44,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    # Their routers choose a group of experts before the experts.
    "glm4_moe": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
}


@pytest.fixture(autouse=True)
def _one_rank() -> None:
    join_process_group()


@pytest.fixture(params=FAMILIES)
def module(request) -> CompletionLogprobs:
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **_SHAPE, **FAMILIES[request.param])
    return CompletionLogprobs(AutoModelForCausalLM.from_config(config).eval())


def run(module: CompletionLogprobs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs and the experts of each input, sorted."""
    with record_routing(module.policy) as record:
        logprobs, _, _ = module(*TOKENS.inputs, 1.0)
    routing = record.routing()
    assert routing is not None
    return logprobs, routing.experts.sort().values


def test_told_experts_are_chosen_until_none_are_told(module):
    before, own = run(module)
    replay = make_replay(module, "recomputed")
    forced = (own + 1) % 4
    replay.force(forced)
    logprobs, chosen = run(module)
    assert torch.equal(chosen, forced.sort().values)
    assert not torch.allclose(logprobs, before)
    replay.force(None)
    after, chosen = run(module)
    assert torch.equal(chosen, own)
    assert torch.equal(after, before)


def test_the_routers_own_choice_replayed_changes_nothing(module):
    replay = make_replay(module, "recomputed")
    with replay.note() as noted:
        before, _, _ = module(*TOKENS.inputs, 1.0)
    # In another order: experts are a set.
    experts = noted()
    assert experts is not None
    replay.force(experts.flip(-1))
    after, _, _ = module(*TOKENS.inputs, 1.0)
    assert torch.allclose(before, after, atol=1e-6)
    assert replay.take_metrics(num_alike=1) == {"loss/replay_changed_slots": 0.0}


def test_the_share_of_changed_slots_is_counted_once(module):
    _, own = run(module)
    replay = make_replay(module, "recomputed")
    forced = own.clone()
    # One of two experts of one token in one layer of two.
    forced[0, 0, 0] = next(expert for expert in range(4) if expert not in own[0, 0].tolist())
    replay.force(forced)
    module(*TOKENS.inputs, 1.0)
    changed = replay.take_metrics(num_alike=1)["loss/replay_changed_slots"]
    # What later tokens and layers choose may change with it.
    assert changed >= 1 / forced.numel()
    assert changed < 0.5
    assert replay.take_metrics(num_alike=1) == {}


def test_the_weight_of_a_told_expert_is_that_of_the_current_logits(module):
    """Replayed experts under other router weights give another output, and the router gets a gradient."""
    replay = make_replay(module, "recomputed")
    _, own = run(module)
    replay.force(own)
    before, _, _ = module(*TOKENS.inputs, 1.0)
    before.sum().backward()
    of_routers = {name: weight for name, weight in module.policy.named_parameters() if _is_router(name)}
    assert of_routers
    for name, weight in of_routers.items():
        assert weight.grad is not None, name
        assert weight.grad.abs().max() > 0, name
        with torch.no_grad():
            weight += 0.5 * torch.randn_like(weight)
    after, _, _ = module(*TOKENS.inputs, 1.0)
    assert not torch.allclose(before, after)


def _is_router(name: str) -> bool:
    return name.endswith((".gate.weight", ".router.weight", ".router.layer.weight", "block_sparse_moe.router.layer.weight"))


def test_with_checkpointed_layers_the_gradient_is_that_of_the_told_experts(tiny_moe_model):
    """A checkpointed layer runs its router again in the backward pass."""
    gradients = []
    for checkpointing in (False, True):
        module = CompletionLogprobs(AutoModelForCausalLM.from_pretrained(tiny_moe_model).eval())
        if checkpointing:
            module.policy.gradient_checkpointing_enable()
            for layer in module.policy.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.training = True
        replay = make_replay(module, "recomputed")
        _, own = run(module)
        replay.force((own + 1) % 4)
        logprobs, _, _ = module(*TOKENS.inputs, 1.0)
        logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in module.policy.parameters() if p.grad is not None]))
    assert torch.allclose(*gradients, atol=1e-5)


def test_experts_of_other_tokens_are_refused(module):
    replay = make_replay(module, "recomputed")
    _, own = run(module)
    replay.force(own[1:])
    with pytest.raises(RuntimeError, match=f"{len(own) - 1} tokens"):
        module(*TOKENS.inputs, 1.0)


def test_a_dense_model_is_refused(tiny_model):
    module = CompletionLogprobs(AutoModelForCausalLM.from_pretrained(tiny_model))
    with pytest.raises(SettingError, match=r"loss\.routing_replay.*no routers that can be forced"):
        make_replay(module, "recomputed")


def test_routers_that_choose_by_other_means_are_refused(tiny_moe_model):
    policy = AutoModelForCausalLM.from_pretrained(tiny_moe_model).eval()

    def choose_by_sorting(self, states):
        logits = torch.nn.functional.linear(states.reshape(-1, self.hidden_dim), self.weight)
        experts = logits.argsort(descending=True)[:, : self.top_k]
        return logits, logits.softmax(-1).gather(-1, experts), experts

    for router in routers(policy):
        router.forward = choose_by_sorting.__get__(router)
    with pytest.raises(SettingError, match=r"loss\.routing_replay"):
        make_replay(CompletionLogprobs(policy), "recomputed")
