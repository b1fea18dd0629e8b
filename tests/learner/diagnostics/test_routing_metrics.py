import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812, torch's own convention
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.common.models.routing import Routing, record_routing
from offbeat.learner.diagnostics.routing_metrics import load_metrics, margin_metrics, routing_metrics
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packing import pack

IDS = torch.tensor([[4 + (7 * index) % 40 for index in range(64)]])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Experts of the same tokens and layers from two sources, and the number of experts in a layer."""
    num_tokens, num_layers, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(2, 7))
    top_k = draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.rand(2, num_tokens, num_layers, num_experts, generator=generator)
    first, second = logits.topk(top_k, dim=-1).indices
    return first, second, num_experts


def test_every_number_by_hand() -> None:
    # Token 0: layer 0 the same set in another order, layer 1 one of two changed. Token 1: one changed, then both.
    # Token 2: nothing changed. 4 of 12 slots, 3 of 6 routers, 2 of 3 tokens; 1 + 2 + 0 routers of 3 tokens.
    experts = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [0, 1]], [[3, 2], [1, 0]]])
    others = torch.tensor([[[1, 0], [2, 0]], [[3, 1], [2, 3]], [[2, 3], [1, 0]]])
    assert routing_metrics(experts, others) == pytest.approx(
        {"overlap": 8 / 12, "changed_slots": 4 / 12, "router_mismatch": 3 / 6, "token_any": 2 / 3, "routers_per_token": 3 / 3}
    )


def test_ids_that_no_expert_has_match_nothing() -> None:
    experts = torch.tensor([[[0, 1]]])
    for foreign in ([-1, 2**31 - 1], [7, 7]):
        assert routing_metrics(experts, torch.tensor([[foreign]]))["overlap"] == 0.0
    # A repeated id is no second expert.
    assert routing_metrics(experts, torch.tensor([[[1, 1]]]))["overlap"] == 0.5


@settings(max_examples=50)
@given(pairs())
def test_numbers_are_those_of_python_sets_whichever_comes_first(pair: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    experts, others, _ = pair
    num_tokens, num_layers, top_k = experts.shape
    metrics = routing_metrics(experts, others)
    shared = changed = tokens = 0
    for token in range(num_tokens):
        sets = [(set(experts[token, layer].tolist()), set(others[token, layer].tolist())) for layer in range(num_layers)]
        shared += sum(len(ours & theirs) for ours, theirs in sets)
        changed += sum(ours != theirs for ours, theirs in sets)
        tokens += any(ours != theirs for ours, theirs in sets)
    assert metrics == pytest.approx(
        {
            "overlap": shared / (num_tokens * num_layers * top_k),
            "changed_slots": 1 - shared / (num_tokens * num_layers * top_k),
            "router_mismatch": changed / (num_tokens * num_layers),
            "token_any": tokens / num_tokens,
            "routers_per_token": changed / num_tokens,
        }
    )
    assert routing_metrics(others, experts) == metrics


@settings(max_examples=50)
@given(pairs())
def test_order_within_a_token_does_not_matter_and_identity_is_exact(pair: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    experts, others, num_experts = pair
    same = {"overlap": 1.0, "changed_slots": 0.0, "router_mismatch": 0.0, "token_any": 0.0, "routers_per_token": 0.0}
    assert routing_metrics(experts, experts.flip(-1)) == same
    assert routing_metrics(experts, others.flip(-1)) == routing_metrics(experts, others)
    load = load_metrics(experts, num_experts=num_experts)
    assert load_metrics(experts.flip(-1), num_experts=num_experts) == load
    assert 1.0 - 1e-9 <= load["load_max_over_mean"] <= num_experts / experts.shape[-1] + 1e-9
    assert -1e-9 <= load["load_entropy"] <= 1.0 + 1e-9


def test_load_by_hand() -> None:
    # Layer 0: all four experts once, as even as can be. Layer 1: expert 2 twice, 0 and 3 once, of a mean of 1.
    experts = torch.tensor([[[0, 1], [2, 0]], [[2, 3], [3, 2]]])
    # p = 1/2, 1/4, 1/4, 0: entropy 1.5 log 2, of at most 2 log 2.
    assert load_metrics(experts, num_experts=4) == pytest.approx({"load_max_over_mean": (1 + 2) / 2, "load_entropy": 0.875})
    one_expert = load_metrics(torch.full((5, 2, 1), 3), num_experts=4)
    assert one_expert == pytest.approx({"load_max_over_mean": 4.0, "load_entropy": 0.0})


def test_margin_percentiles_by_hand() -> None:
    # 0 to 100 in some order: the p-th percentile is p.
    margins = torch.arange(101.0)[torch.randperm(101, generator=torch.Generator().manual_seed(0))]
    assert margin_metrics(margins[:, None]) == {"margin_p5": 5.0, "margin_p25": 25.0, "margin_p50": 50.0}
    infinite = margin_metrics(torch.full((4, 2), math.inf))
    assert infinite == {"margin_p5": math.inf, "margin_p25": math.inf, "margin_p50": math.inf}


@torch.no_grad()
def route(policy: PreTrainedModel) -> Routing:
    with record_routing(policy) as record:
        policy.base_model(input_ids=IDS[:, :-1], use_cache=False)
    routing = record.routing()
    assert routing is not None
    return routing


def test_an_optimizer_step_changes_some_experts_and_the_same_weights_none(tiny_moe_model) -> None:
    policy = AutoModelForCausalLM.from_pretrained(tiny_moe_model).eval()
    before = route(policy)
    assert routing_metrics(before.experts, route(policy).experts)["overlap"] == 1.0

    F.cross_entropy(policy(IDS[:, :-1]).logits[0], IDS[0, 1:], reduction="sum").backward()
    torch.optim.SGD(policy.parameters(), lr=0.1).step()
    after = route(policy)
    metrics = routing_metrics(before.experts, after.experts)
    assert 0 < metrics["overlap"] < 1
    assert 0 < metrics["router_mismatch"] <= metrics["token_any"] < 1 or metrics["token_any"] == 1
    assert metrics["routers_per_token"] == pytest.approx(metrics["router_mismatch"] * before.experts.shape[1])


def test_what_the_logprobs_pass_records_is_what_a_pass_of_the_policy_records(tiny_moe_model) -> None:
    """The forward pass that scores the canary records its routing."""
    policy = AutoModelForCausalLM.from_pretrained(tiny_moe_model).eval()
    expected = route(policy)
    tokens = IDS[0].numpy()
    packed = pack([(tokens[:1], [tokens[1:]])])
    module = CompletionLogprobs(policy)
    with torch.no_grad(), record_routing(policy) as record:
        module(packed.token_ids, packed.position_ids, packed.predictors, packed.targets, packed.spans, 1.0)
    routing = record.routing()
    assert routing is not None
    assert torch.equal(routing.experts, expected.experts)


def test_rows_with_a_small_margin_are_the_ones_that_flip(tiny_moe_model) -> None:
    """Logits that move by less than half of the margin change no expert; router noise changes tokens with small margins."""
    policy = AutoModelForCausalLM.from_pretrained(tiny_moe_model).eval()
    before = route(policy)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("layers.1.mlp.gate.weight"):
                parameter += 0.005 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    after = route(policy)
    is_changed = (before.experts.sort(-1).values != after.experts.sort(-1).values).any(-1)
    assert not is_changed[:, 0].any()
    assert 0 < int(is_changed[:, 1].sum()) < len(is_changed)
    margins = before.margins[:, 1]
    assert margins[is_changed[:, 1]].median() < margins[~is_changed[:, 1]].median()
