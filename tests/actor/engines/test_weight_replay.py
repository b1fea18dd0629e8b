"""Replayed commits leave the bytes that the loader leaves, and a loader that does more than copy is not replayed."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from offbeat.actor.engines.weight_replay import NotReplayableError, Packer, WeightReplay, learn
from offbeat.common.weights.flat import WeightBuffer, make_layout
from tests.late_copies import LateCopies

SHAPES = {"q": (4, 6), "k": (2, 6), "embed": (5, 6), "down": (6, 8), "experts": (3, 6, 4), "norm": (6,), "scale": ()}
LAYOUT = make_layout(SHAPES.items(), torch.float32)


def some_weights(seed: int) -> dict[str, Tensor]:
    """Return weights in one buffer, as an actor receives them."""
    buffer = WeightBuffer(LAYOUT)
    generator = torch.Generator().manual_seed(seed)
    for _, view in buffer.views():
        view.copy_(torch.randn(view.shape, generator=generator))
    return dict(buffer.views())


class Layer(nn.Module):
    """A layer with one weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Model(nn.Module):
    """A model whose tensors are slices, merges, paddings and casts of the incoming ones, as in vLLM."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = Layer(torch.zeros(6, 6))
        self.embed = Layer(torch.ones(8, 6))
        self.head = nn.Module()
        self.head.weight = self.embed.weight
        self.down = Layer(torch.zeros(6, 4))
        self.experts = Layer(torch.zeros(3, 4, 6, dtype=torch.bfloat16))
        self.norm = Layer(torch.zeros(6))
        self.register_buffer("scale", torch.zeros(()))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load as vLLM reloads: into a temporary tensor, from there into the storage that graphs know."""
        merged = torch.empty_strided((6, 6), (6, 1))
        merged.data.narrow(0, 0, 4).copy_(weights["q"])
        merged.data[4:].copy_(weights["k"])
        self.qk.weight.data.copy_(merged)
        self.embed.weight[:5].data.copy_(weights["embed"])
        self.embed.weight[5:].data.fill_(0)
        # The right half of the columns, as on the second of two ranks.
        self.down.weight.data.copy_(weights["down"].chunk(2, dim=1)[1])
        for expert in range(3):
            self.experts.weight.data[expert].copy_(weights["experts"][expert].t())
        self.norm.weight.data.copy_(weights["norm"])
        self.norm.weight.data.copy_(self.norm.weight.data)
        self.get_buffer("scale").copy_(weights["scale"])


def learned(model: Model, weights: Mapping[str, Tensor], after: Callable[[], object] = lambda: None) -> WeightReplay:
    """Return the replay of a loader that calls `after` at its end."""

    def load() -> None:
        model.load(weights)
        after()

    return learn(model, weights, load)


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def loaded(weights: Mapping[str, Tensor]) -> Model:
    model = Model()
    model.load(weights)
    return model


def test_replay_leaves_the_bytes_that_the_loader_leaves_in_the_same_storages() -> None:
    model = Model()
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    first = some_weights(1)
    replay = learned(model, first)
    assert_same(model, loaded(first))
    for seed in (2, 3):
        # Another buffer; then the same one with other bytes, as at every update of a run.
        weights = some_weights(seed)
        replay.load(weights)
        assert_same(model, loaded(weights))
        for tensor in weights.values():
            tensor.mul_(-3)
        replay.load(weights)
        assert_same(model, loaded(weights))
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == addresses


def test_weights_may_be_overwritten_when_a_replay_onto_a_gpu_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = Model(), some_weights(1)
    replay = learned(model, weights)
    replay._devices = {torch.device("cuda")}
    new = some_weights(2)
    with LateCopies() as stream:
        monkeypatch.setattr(torch.accelerator, "current_stream", {torch.device("cuda"): stream}.__getitem__)
        replay.load(new)
        assert (stream.most_late, stream.num_late) == (len(replay._targets), 0)
    assert_same(model, loaded(new))


def double_silently(tensor: Tensor) -> None:
    tensor.detach().numpy()[:] *= 2


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (lambda model, weights: model.norm.weight.data.mul_(2), "aten.mul_"),
        (lambda model, weights: model.norm.weight.data.copy_(weights["norm"].exp()), "aten.exp"),
        (lambda model, weights: setattr(model, "transposed", model.qk.weight.t().contiguous()), "aten.clone"),
        (lambda model, weights: model.qk.weight.data.copy_(torch.ones(6, 6)), "computed from the weights"),
        (
            lambda model, weights: model.qk.weight.data.copy_(model.down.weight.data.repeat(1, 2)[:, :6]),
            "repeat|cat|copy|clone",
        ),
        (lambda model, weights: double_silently(model.norm.weight), "weight of a Layer is not a copy"),
    ],
    ids=["in place", "computed", "derived", "constant", "joined", "not seen"],
)
def test_loader_that_does_more_than_copy_is_not_replayed(
    after: Callable[[Model, Mapping[str, Tensor]], object], reason: str
) -> None:
    weights = some_weights(1)
    model, expected = Model(), loaded(weights)
    after(expected, weights)
    with pytest.raises(NotReplayableError, match=reason):
        learned(model, weights, lambda: after(model, weights))
    assert_same(model, expected)


def test_incoming_tensor_that_is_not_copied_is_named() -> None:
    weights = some_weights(1)
    model = Model()

    def load() -> None:
        model.load(weights)
        model.norm.weight = nn.Parameter(torch.zeros(6), requires_grad=False)

    with pytest.raises(NotReplayableError, match="does not copy norm"):
        learn(model, weights, load)


@pytest.mark.parametrize("change", ["parameter", "memory", "layout"])
def test_replay_ends_when_the_model_or_the_layout_changes(change: str) -> None:
    model, weights = Model(), some_weights(1)
    replay = learned(model, weights)
    if change == "parameter":
        model.norm.weight = nn.Parameter(torch.zeros(6), requires_grad=False)
    elif change == "memory":
        model.norm.weight.data = torch.zeros(6)
    else:
        weights["norm"] = torch.zeros(7)
    with pytest.raises(NotReplayableError, match="layout" if change == "layout" else "replaced weight"):
        replay.load(weights)


def test_every_row_of_every_landing_is_compared_with_its_source_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = Model(), some_weights(1)
    replay = learned(model, weights)
    copy = vars(torch)["_foreach_copy_"]

    def copy_and_damage(targets: list[Tensor], sources: list[Tensor], non_blocking: bool) -> None:
        copy(targets, sources, non_blocking)
        model.experts.weight.data[1, 2, 3] += 1

    for _ in range(60):
        replay.load(weights)
    monkeypatch.setattr(torch, "_foreach_copy_", copy_and_damage)
    with pytest.raises(NotReplayableError, match="not those that arrived"):
        for _ in range(60):
            replay.load(weights)


class Packing:
    """Keeps a packed copy of a layer's weight, in place of the weight if `removes`."""

    def __init__(self, *, removes: bool) -> None:
        self.removes = removes
        self.packed = torch.zeros(0)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.packed = layer.get_parameter("weight").t().contiguous() + 0
        if self.removes:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class PackedModel(nn.Module):
    """A model with a linear layer that is only packed, and an embedding that is packed too."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = Layer(torch.empty(0))
        self.embed = Layer(torch.zeros(5, 6))
        self.packers = (Packing(removes=True), Packing(removes=False))

    def load(self, weights: Mapping[str, Tensor], num_rows: int = 4) -> None:
        own = self.qk.weight
        self.qk.weight = nn.Parameter(torch.empty(4 + 2, 6), requires_grad=False)
        self.qk.weight.data[:num_rows].copy_(weights["q"][:num_rows])
        self.qk.weight.data[4:].copy_(weights["k"])
        self.packers[0].process_weights_after_loading(self.qk)
        self.qk.weight = own
        self.embed.weight.data.copy_(weights["embed"])
        self.packers[1].process_weights_after_loading(self.embed)


def packed_weights(seed: int) -> dict[str, Tensor]:
    weights = some_weights(seed)
    return {name: weights[name] for name in ("q", "k", "embed")}


def test_packed_layers_are_packed_anew_and_keep_their_own_parameters() -> None:
    model = PackedModel()
    own = dict(model.named_parameters())
    first, second = packed_weights(1), packed_weights(2)
    packers: list[Packer] = list(model.packers)
    replay = learn(model, first, lambda: model.load(first), packers)
    replay.load(second)
    assert torch.equal(model.packers[0].packed, torch.cat([second["q"], second["k"]]).t())
    assert torch.equal(model.packers[1].packed, second["embed"].t())
    assert all(own[name] is parameter for name, parameter in model.named_parameters())


def test_packed_layer_with_rows_that_no_tensor_fills_is_not_replayed() -> None:
    model, weights = PackedModel(), packed_weights(1)
    with pytest.raises(NotReplayableError, match="weight of a Layer is not a copy"):
        learn(model, weights, lambda: model.load(weights, num_rows=3), list(model.packers))
