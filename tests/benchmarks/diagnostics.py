"""The cost of an optimizer step's diagnostics, relative to its forward and backward passes.

    python -m tests.benchmarks.diagnostics    # some minutes on two cores

A step is 64 completions of 512 tokens in micro-batches of 8, through a random Qwen3 in float32, under decoupled GSPO with a
correction, which has every metric. Measured in the same step:

    step          forward, loss and backward of all micro-batches
    rows          row_statistics of all micro-batches
    metrics       loss_metrics, once
    direction     GradientDirection.compare, once, on all gradients as without ZeRO

The models are that of the quick start, with the cheapest passes, and a larger one. The optimizer's time is not in the step.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offbeat.common.processes.environment import prepare_environment
from offbeat.common.settings.completion import complete_loss
from offbeat.common.settings.learning_sections import LossSection

prepare_environment()

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from offbeat.learner.diagnostics.batch_metrics import loss_metrics  # noqa: E402
from offbeat.learner.diagnostics.row_statistics import row_statistics  # noqa: E402
from offbeat.learner.diagnostics.step_table import GradientDirection  # noqa: E402
from offbeat.learner.objectives.aggregation import aggregate  # noqa: E402
from offbeat.learner.objectives.objective import PolicyLogprobs, make_objective  # noqa: E402
from tests.benchmarks.measuring import print_table, spread  # noqa: E402

NUM_ROUNDS = 5
NUM_ROWS, NUM_TOKENS, MICRO_BATCH_ROWS = 64, 512, 8
OBJECTIVE = make_objective(
    complete_loss(LossSection(anchor="decoupled", correction="token_tis(0, 1.01)"), max_new_tokens=NUM_TOKENS)
)
PARTS = ("rows", "metrics", "direction")


class ModelSize(NamedTuple):
    """The size of a Qwen3 with four heads, two of them for keys and values."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int


MODELS = {"quick start": ModelSize(128, 256, 2, 44), "larger": ModelSize(384, 1024, 4, 4096)}


class MicroBatch(NamedTuple):
    """The inputs of one pass; the token before the first one is the beginning of the text."""

    token_ids: Tensor
    behavior_logprobs: Tensor
    proximal_logprobs: Tensor
    completion_mask: Tensor
    advantages: Tensor


def make_model(size: ModelSize) -> Qwen3ForCausalLM:
    """Return a random model."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        vocab_size=size.vocab_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.hidden_size // 4,
        max_position_embeddings=NUM_TOKENS + 1,
    )
    return Qwen3ForCausalLM(config)


def logprobs_of(model: nn.Module, token_ids: Tensor) -> Tensor:
    """Return log-probs of every token but the first, `[rows, NUM_TOKENS]`."""
    logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits.float()
    return logits.log_softmax(dim=-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)


def make_micro_batches(model: Qwen3ForCausalLM) -> list[MicroBatch]:
    """Return random completions of 1/8 to all of the width, log-probs a little off the model's."""
    generator = torch.Generator().manual_seed(1)
    micro_batches = []
    for _ in range(NUM_ROWS // MICRO_BATCH_ROWS):
        shape = (MICRO_BATCH_ROWS, NUM_TOKENS)
        token_ids = torch.randint(model.config.vocab_size, (MICRO_BATCH_ROWS, NUM_TOKENS + 1), generator=generator)
        lengths = torch.randint(NUM_TOKENS // 8, NUM_TOKENS + 1, (MICRO_BATCH_ROWS, 1), generator=generator)
        with torch.no_grad():
            proximal = logprobs_of(model, token_ids) + 1e-3 * torch.randn(shape, generator=generator)
        behavior = proximal + 1e-2 * torch.randn(shape, generator=generator)
        advantages = torch.randn(MICRO_BATCH_ROWS, 1, generator=generator).expand(shape)
        micro_batches.append(MicroBatch(token_ids, behavior, proximal, torch.arange(NUM_TOKENS) < lengths, advantages))
    return micro_batches


class Clock:
    """A stopwatch that sums the seconds of each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Add the time inside the context to this part."""
        started = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - started


def run_step(model: nn.Module, micro_batches: list[MicroBatch], direction: GradientDirection) -> dict[str, float]:
    """Run one step; return the seconds of each part."""
    clock = Clock()
    model.zero_grad()
    tables = []
    row_weights, policy_lags = torch.ones(MICRO_BATCH_ROWS), torch.arange(MICRO_BATCH_ROWS)
    for token_ids, behavior, proximal, mask, advantages in micro_batches:
        with clock.on("step"):
            policy = logprobs_of(model, token_ids)
            logprobs = PolicyLogprobs(policy, behavior, proximal)
            evaluation = OBJECTIVE.evaluate(logprobs, mask, advantages)
            (aggregate(evaluation.losses, mask, row_weights, mode=OBJECTIVE.aggregation) / NUM_ROWS).backward()
        with clock.on("rows"):
            tables.append(
                row_statistics(
                    logprobs,
                    evaluation,
                    completion_mask=mask,
                    advantages=advantages,
                    row_weights=row_weights,
                    policy_lags=policy_lags,
                    turns=torch.zeros_like(mask, dtype=torch.int64),
                )
            )
    with clock.on("metrics"):
        loss_metrics(torch.cat(tables), aggregation=OBJECTIVE.aggregation, denominator=NUM_ROWS)
    with clock.on("direction"):
        direction.compare((name, parameter.grad) for name, parameter in model.named_parameters())
    return clock.seconds


def measure(model: Qwen3ForCausalLM) -> list[dict[str, float]]:
    """Return the seconds of each round, after a warm-up round."""
    micro_batches, direction = make_micro_batches(model), GradientDirection()
    return [run_step(model, micro_batches, direction) for _ in range(1 + NUM_ROUNDS)][1:]


def main() -> None:
    """Measure and print."""
    rows = []
    for name, size in MODELS.items():
        model = make_model(size)
        rounds = measure(model)
        milliseconds = [spread([1e3 * seconds[part] for seconds in rounds], 1) for part in ("step", *PARTS)]
        shares = spread([100 * sum(seconds[part] for part in PARTS) / seconds["step"] for seconds in rounds])
        rows.append([f"{name}, {model.num_parameters() / 1e6:.1f} M", *milliseconds, shares])
    print_table(
        f"Diagnostics of {NUM_ROWS} x {NUM_TOKENS} tokens, ms, {NUM_ROUNDS} rounds: median (min–max)",
        ("model", "step", *PARTS, "% of the step"),
        rows,
    )


if __name__ == "__main__":
    main()
