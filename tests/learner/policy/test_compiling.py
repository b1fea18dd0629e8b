"""Compiled decoder layers: torch traces them whole, and losses and gradients stay the same. No code is generated here."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import Qwen3Config, Qwen3MoeConfig

from offbeat.common.errors import SettingError
from offbeat.common.settings.loading import load
from offbeat.learner.policy import loading, packed_attention
from offbeat.learner.policy.loading import DISABLE_VARIABLES, check_compiling, compile_layers, compiles_layers, load_policy
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.lora import with_merged_weights
from offbeat.learner.policy.packing import Pack, pack

pytestmark = pytest.mark.slow

PACKS = (
    pack([([4, 5, 6], [[7, 8, 9], [7]]), ([4, 5], [[6, 7, 8, 9, 10]])]),
    pack([([9, 8, 7, 6], [[5, 4], [11, 12, 13, 14]])]),
    pack([([5, 6], [[7, 8, 9], [9, 9, 8, 8]]), ([7, 7, 7], [[6, 5, 4]]), ([20], [[21, 22, 23, 24]])]),
)


def sequences(query: Tensor, key: Tensor, value: Tensor, query_offsets: Tensor, key_offsets: Tensor, scale: float, left: int):
    """Yield each sequence as torch's kernel on GPUs sees it: slices, keys and values by query head, attention weights.

    The last query is aligned with the last key. `left`: keys that a query sees before its own, -1 for all.
    """
    for index in range(len(query_offsets) - 1):
        queries = slice(int(query_offsets[index]), int(query_offsets[index + 1]))
        keys = slice(int(key_offsets[index]), int(key_offsets[index + 1]))
        of_key, of_value = (
            part[keys].transpose(0, 1).repeat_interleave(query.shape[1] // part.shape[1], dim=0) for part in (key, value)
        )
        distance = torch.arange(keys.stop - keys.start)[-(queries.stop - queries.start) :, None] - torch.arange(
            keys.stop - keys.start
        )
        visible = (distance >= 0) & ((distance <= left) if left >= 0 else True)
        scores = query[queries].transpose(0, 1) @ of_key.transpose(1, 2) * scale
        yield queries, keys, of_key, of_value, scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a CPU in float32 take the path of a GPU in bfloat16, with an imitation of its kernel."""

    @varlen._varlen_attn.register_kernel("cpu")
    def forward(query: Tensor, key: Tensor, value: Tensor, *others) -> tuple[Tensor, Tensor, Tensor]:
        query_offsets, key_offsets, _, _, _, scale, (left, _), *_ = others
        attended = torch.empty_like(query)
        for queries, _, _, of_value, weights in sequences(query, key, value, query_offsets, key_offsets, scale, left):
            attended[queries] = (weights @ of_value).transpose(0, 1)
        return attended, query.new_zeros(query.shape[1], len(query)), query.new_zeros(2, dtype=torch.uint64)

    @varlen._varlen_attn_backward.register_kernel("cpu")
    def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *others) -> tuple[Tensor, Tensor, Tensor]:
        _, _, query_offsets, key_offsets, _, _, _, _, scale, (left, _) = others
        grads = [torch.zeros_like(part) for part in (query, key, value)]

        def of_key_heads(grad: Tensor) -> Tensor:
            return grad.unflatten(0, (key.shape[1], -1)).sum(dim=1).transpose(0, 1)

        for queries, keys, of_key, of_value, weights in sequences(query, key, value, query_offsets, key_offsets, scale, left):
            grad = grad_out[queries].transpose(0, 1)
            grad_weights = grad @ of_value.transpose(1, 2)
            grad_scores = weights * (grad_weights - (grad_weights * weights).sum(dim=-1, keepdim=True)) * scale
            grads[0][queries] = (grad_scores @ of_key).transpose(0, 1)
            grads[1][keys] = of_key_heads(grad_scores.transpose(1, 2) @ query[queries].transpose(0, 1))
            grads[2][keys] = of_key_heads(weights.transpose(1, 2) @ grad)
        return grads[0], grads[1], grads[2]

    monkeypatch.setattr(packed_attention.PlacedSpans, "is_in_line", lambda self, dtype: True)


def losses_and_gradients(module: CompletionLogprobs, packs: tuple[Pack, ...]) -> tuple[list[Tensor], list[Tensor]]:
    losses: list[Tensor] = []
    module.zero_grad()
    for packed in packs:
        logprobs, _, _ = module(*packed.inputs, 1.0)
        (logprobs * torch.arange(1.0, len(logprobs) + 1)).sum().backward()
        losses.append(logprobs.detach())
    return losses, [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("overrides", "num_graphs"),
    [((), 4), (("train.activation_checkpointing=offload", "lora.rank=2"), 4)],
    ids=["plain", "offloaded, with an adapter"],
)
def test_layers_are_traced_whole_and_once_and_give_the_same(
    tiny_model: Path, flash_on_cpu: None, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], num_graphs: int
):
    monkeypatch.delenv(DISABLE_VARIABLES[0], raising=False)
    config = load(None, [f"model.path={tiny_model}", "model.dtype=float32", *overrides])
    module = load_policy(config)
    expected = losses_and_gradients(module, PACKS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # What `compile_layers` changes for the whole process is put back.
    with torch._dynamo.config.patch(suppress_errors=False, recompile_limit=8):
        compile_layers(module, backend="aot_eager")
        # An error is an error here.
        torch._dynamo.config.suppress_errors = False
        torch.testing.assert_close(losses_and_gradients(module, PACKS), expected)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert 1 <= counters["stats"]["unique_graphs"] <= num_graphs
    assert not [name for name, _ in module.named_parameters() if "_orig_mod" in name]


def test_layers_are_not_compiled_for_their_merged_weights(
    tiny_model: Path, flash_on_cpu: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(DISABLE_VARIABLES[0], raising=False)
    module = load_policy(load(None, [f"model.path={tiny_model}", "model.dtype=float32", "lora.rank=2"]))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts = torch._dynamo.utils.counters["stats"]
    with torch.no_grad(), torch._dynamo.config.patch(suppress_errors=False, recompile_limit=8):
        compile_layers(module, backend="eager")
        adapted, _, _ = module(*PACKS[0].inputs, 1.0)
        num_compiled = counts["unique_graphs"]
        for _ in range(2):
            with with_merged_weights(module.policy):
                merged, _, _ = module(*PACKS[0].inputs, 1.0)
            torch.testing.assert_close(merged, adapted)
    assert 1 <= num_compiled == counts["unique_graphs"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Make this process look like one that can compile for a GPU."""
    for variable in DISABLE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: name)
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("overrides", "device", "variable", "obstacle"),
    [
        ([], "cuda", None, None),
        ([], "cuda", "TORCHDYNAMO_DISABLE", "TORCHDYNAMO_DISABLE turns compilation off"),
        ([], "cuda", "TORCH_COMPILE_DISABLE", "TORCH_COMPILE_DISABLE turns compilation off"),
        ([], "cpu", None, "takes a GPU"),
        (["model.dtype=float32"], "cuda", None, "float32"),
        (["train.zero_stage=3"], "cuda", None, "zero_stage = 3"),
        (["train.sequence_parallel_size=2"], "cuda", None, "sequence_parallel_size = 2"),
    ],
)
def test_layers_are_compiled_where_that_is_safe(
    gpu: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    device: str,
    variable: str | None,
    obstacle: str | None,
):
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    place = torch.device(device)
    automatic, off, on = (load(None, [f"train.compile={value}", *overrides]) for value in ("auto", "off", "on"))
    assert compiles_layers(automatic, Qwen3Config(), place) == (obstacle is None)
    assert not compiles_layers(off, Qwen3Config(), place)
    check_compiling(automatic, place)
    if obstacle is None:
        assert compiles_layers(on, Qwen3Config(), place)
        return
    for refused in (lambda: check_compiling(on, place), lambda: compiles_layers(on, Qwen3Config(), place)):
        with pytest.raises(SettingError, match=rf'train.compile = "on".*{obstacle}.*Set it to "auto" or "off"'):
            refused()


def test_without_triton_nothing_is_compiled(gpu: torch.device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    assert not compiles_layers(load(None, []), Qwen3Config(), gpu)


def test_experts_are_not_compiled_and_the_log_says_so(gpu: torch.device, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger=loading.__name__):
        assert not compiles_layers(load(None, []), Qwen3MoeConfig(), gpu)
    assert "not compiled: the experts" in caplog.text
    with pytest.raises(SettingError, match="the experts"):
        compiles_layers(load(None, ["train.compile=on"]), Qwen3MoeConfig(), gpu)


def test_anchor_that_expects_equal_logprobs_is_compiled_only_on_demand(gpu: torch.device):
    anchored = ["loss.anchor=proximal", "train.steps_per_batch=2"]
    assert not compiles_layers(load(None, anchored), Qwen3Config(), gpu)
    assert compiles_layers(load(None, [*anchored, "train.compile=on"]), Qwen3Config(), gpu)
