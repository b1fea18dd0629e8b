"""Routing recorded from running models equals the routing that transformers reports."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.glm4_moe import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.models.granitemoe import GraniteMoeConfig, GraniteMoeForCausalLM
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM
from transformers.models.olmoe import OlmoeConfig, OlmoeForCausalLM
from transformers.utils.output_capturing import OutputRecorder

from offbeat.common.models.routing import Routing, record_routing

pytestmark = pytest.mark.slow

NUM_LAYERS = 3
NUM_EXPERTS = 8
TOP_K = 2
SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
IDS = torch.tensor([[5, 6, 7, 8, 30, 2, 9], [1, 1, 2, 3, 5, 8, 13]])


def make(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    match kind:
        case "mixtral":
            model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=NUM_EXPERTS))
        case "olmoe":
            model = OlmoeForCausalLM(OlmoeConfig(**SHAPE, num_experts=NUM_EXPERTS))
        case "granite":
            model = GraniteMoeForCausalLM(GraniteMoeConfig(**SHAPE, num_local_experts=NUM_EXPERTS))
        case "glm":
            model = Glm4MoeForCausalLM(
                Glm4MoeConfig(**SHAPE, n_routed_experts=NUM_EXPERTS, moe_intermediate_size=16, first_k_dense_replace=1)
            )
        case _:
            raise AssertionError(kind)
    return model.eval()


@torch.no_grad()
def route(model: nn.Module, ids: Tensor = IDS) -> Routing | None:
    with record_routing(model) as record:
        model(input_ids=ids)
    return record.routing()


class Router(nn.Module):
    """A router that chooses the two largest logits."""

    def forward(self, logits: Tensor) -> Any:
        weights, experts = logits.topk(2, dim=-1)
        return weights, experts, logits


class SilentRouter(Router):
    """A router that does not return its choice, like Llama 4's."""

    def forward(self, logits: Tensor) -> Any:
        weights, _, logits = super().forward(logits)
        return weights, weights, logits


class UndecidedRouter(Router):
    """A router that returns two integer tensors, either of which may be the experts."""

    def forward(self, logits: Tensor) -> Any:
        _, experts, logits = super().forward(logits)
        return experts, experts, logits


class BareRouter(Router):
    """A router that returns only its choice."""

    def forward(self, logits: Tensor) -> Any:
        return super().forward(logits)[1]


class ContraryRouter(Router):
    """A router that chooses the two smallest logits."""

    def forward(self, logits: Tensor) -> Any:
        weights, experts, _ = super().forward(-logits)
        return weights, experts, logits


class Routers(PreTrainedModel):
    """Two layers that route by their input, the second one by its negation."""

    config_class = PreTrainedConfig
    _can_record_outputs = {"router_logits": OutputRecorder(Router, index=2)}  # noqa: RUF012  transformers' own convention

    def __init__(self, router: type[Router] = Router) -> None:
        super().__init__(PreTrainedConfig())
        self.first, self.second = router(), router()

    def forward(self, logits: Tensor) -> None:
        self.first(logits)
        self.second(-logits)


def test_experts_and_margins_by_hand() -> None:
    model = Routers()
    with record_routing(model) as record:
        # Experts 1 and 3, margin 2 - 1; of the negation experts 2 and 0, margin -1 - -2.
        # Experts 0 and 2, margin 4 - 0.5; of the negation 3 and 1, margin -0.5 - -4.
        model(torch.tensor([[1.0, 7.0, 0.0, 2.0], [5.0, 0.5, 4.0, 0.0]]))
    routing = record.routing()
    assert routing is not None
    assert routing.experts.sort(dim=-1).values.tolist() == [[[1, 3], [0, 2]], [[0, 2], [1, 3]]]
    assert routing.margins.tolist() == [[1.0, 1.0], [3.5, 3.5]]
    assert routing.margins.dtype == torch.float32
    assert routing.num_experts == 4


def test_margin_is_below_zero_where_logits_alone_do_not_decide() -> None:
    model = Routers(ContraryRouter)
    with record_routing(model) as record:
        # Experts 2 and 0 with logits 0 and 1, the largest other is 7; of the negation 1 and 3 with -7 and -2, the other 0.
        model(torch.tensor([[1.0, 7.0, 0.0, 2.0]]))
    routing = record.routing()
    assert routing is not None
    assert routing.experts.sort(dim=-1).values.tolist() == [[[0, 2], [1, 3]]]
    assert routing.margins.tolist() == [[-7.0, -7.0]]


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "granite"])
def test_experts_are_the_largest_of_the_logits_that_the_model_tells(kind: str) -> None:
    model = make(kind)
    routing = route(model)
    assert routing is not None
    with torch.no_grad():
        # [layers, tokens, experts]; the rows of the batch follow one another.
        logits = torch.stack(model(IDS, output_router_logits=True).router_logits)
    largest, experts = logits.topk(TOP_K + 1, dim=-1)
    assert routing.experts.shape == (IDS.numel(), NUM_LAYERS, TOP_K)
    expected = experts[..., :TOP_K].transpose(0, 1).sort(dim=-1).values
    assert torch.equal(routing.experts.sort(dim=-1).values, expected)
    torch.testing.assert_close(routing.margins, (largest[..., TOP_K - 1] - largest[..., TOP_K]).T)
    assert routing.num_experts == NUM_EXPERTS


def test_a_bias_that_balances_load_counts_and_dense_layers_do_not() -> None:
    """GLM chooses by logits plus a bias: the experts recorded are the ones used, not those of the largest logits."""
    model = make("glm")
    unbiased = route(model)
    assert unbiased is not None
    assert unbiased.experts.shape == (IDS.numel(), NUM_LAYERS - 1, TOP_K)
    assert (unbiased.margins >= 0).all()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[3:5] = 10.0
    biased = route(model)
    assert biased is not None
    assert (biased.experts.sort(dim=-1).values == torch.tensor([3, 4])).all()
    assert (biased.margins < 0).any()


def test_a_dense_model_has_no_routing(tiny_model) -> None:
    assert route(AutoModelForCausalLM.from_pretrained(tiny_model)) is None


@pytest.mark.parametrize("router", [SilentRouter, UndecidedRouter, BareRouter])
def test_routers_that_do_not_tell_their_choice_have_no_routing(router: type[Router]) -> None:
    model = Routers(router)
    with record_routing(model) as record:
        model(torch.rand(1, 4))
    assert record.routing() is None


def test_layers_of_different_shapes_have_no_routing() -> None:
    model = Routers()
    with record_routing(model) as record:
        model.first(torch.rand(5, 4))
        model.second(torch.rand(5, 8))
    assert record.routing() is None


def test_recording_changes_no_logit_and_ends_with_the_context(tiny_moe_model) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_model).eval()
    with torch.no_grad():
        before = model(IDS).logits
        with record_routing(model) as record:
            assert torch.equal(model(IDS).logits, before)
        first = record.routing()
        model(IDS[:, :3])
    again = record.routing()
    assert first is not None and again is not None
    assert torch.equal(first.experts, again.experts)
    with pytest.raises(KeyError), record_routing(model):
        raise KeyError
    assert not any(module._forward_hooks for module in model.modules())


def test_the_last_pass_counts_and_layers_keep_their_order(tiny_moe_model) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_model).eval()
    expected = route(model, IDS[:, :4])
    with torch.no_grad(), record_routing(model) as record:
        model(IDS)
        model(IDS[:, :4])
    routing = record.routing()
    assert expected is not None and routing is not None
    assert torch.equal(routing.experts, expected.experts)
    assert torch.equal(routing.margins, expected.margins)


def test_checkpointed_layers_are_recorded_once_and_gradients_stay(tiny_moe_model) -> None:
    """Checkpointed layers run again in the backward pass and make the same choices."""
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_model).eval()
    expected = route(model)
    model(IDS).logits.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model.train()
    with record_routing(model) as record:
        logits = model(IDS).logits
        routing = record.routing()
        logits.sum().backward()
    assert expected is not None and routing is not None
    assert torch.equal(routing.experts, expected.experts)
    again = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(again, gradients)
