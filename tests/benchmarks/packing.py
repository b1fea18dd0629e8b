"""The time that packing and sharing prompts save, compared with padded rows in the same run.

    python -m tests.benchmarks.packing    # 3 minutes of one core

Forward and backward of a Qwen3 of 15 M parameters, float32, over groups of 8 completions of a prompt of 128 tokens;
completions are log-normally long, 32 to 1,024 tokens:

    padded    rows of prompt and completion, sorted by length, in micro-batches of at most 8,192 tokens with padding
    packed    the same rows in packs of at most 8,192 inputs, no padding, each with its own prompt
    shared    packs of at most 8,192 inputs whose completions share their prompts

Tokens are completion tokens; inputs are all tokens that go through the model, padding and prompts included. CPU seconds are
of all threads, and depend less on other load than wall time.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.common.processes.environment import prepare_environment
from tests.benchmarks.measuring import NUM_ROUNDS, print_table, spread

NUM_GROUPS = 4
GROUP_SIZE = 8
PROMPT_LENGTH = 128
MIN_LENGTH, MEDIAN_LENGTH, MAX_LENGTH = 32, 192, 1024
MICRO_BATCH_TOKENS = 8192
VOCAB_SIZE = 4096

Tokens = NDArray[np.int32]
Sequences = list[tuple[Tokens, list[Tokens]]]
"""Prompts with their completions."""


class Trial(NamedTuple):
    """One pass over all groups."""

    wall_s: float
    cpu_s: float
    num_inputs: int
    checksum: float
    """Sum of all log-probs, which must agree between variants."""


def make_groups() -> Sequences:
    """Return random groups, the same at each call."""
    random = np.random.default_rng(0)

    def tokens(length: int) -> Tokens:
        return random.integers(0, VOCAB_SIZE, length, dtype=np.int32)

    lengths = np.clip(random.lognormal(np.log(MEDIAN_LENGTH), 0.8, (NUM_GROUPS, GROUP_SIZE)), MIN_LENGTH, MAX_LENGTH)
    return [(tokens(PROMPT_LENGTH), [tokens(int(length)) for length in of_group]) for of_group in lengths]


def make_policy() -> Any:
    """Return a small model with the proportions of a large one."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()


def padded(groups: Sequences) -> tuple[int, float]:
    """Run all groups; return the number of inputs and the sum of all log-probs."""
    import torch

    from offbeat.learner.policy.logprobs import HeadSettings, token_logprobs

    policy = make_policy()
    rows = [(prompt, completion) for prompt, completions in groups for completion in completions]
    rows.sort(key=lambda row: -len(row[1]))
    num_inputs, checksum = 0, 0.0
    while rows:
        width = sum(map(len, rows[0])) - 1
        num_rows = max(1, MICRO_BATCH_TOKENS // width)
        of_micro_batch, rows = rows[:num_rows], rows[num_rows:]
        token_ids = torch.zeros(len(of_micro_batch), width + 1, dtype=torch.int64)
        predicting = torch.zeros(len(of_micro_batch), width, dtype=torch.bool)
        for index, (prompt, completion) in enumerate(of_micro_batch):
            length = len(prompt) + len(completion)
            token_ids[index, :length] = torch.from_numpy(np.concatenate([prompt, completion]))
            predicting[index, len(prompt) - 1 : length - 1] = True
        states = policy.model(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state[predicting]
        logprobs, _ = token_logprobs(states, policy.lm_head.weight, None, token_ids[:, 1:][predicting], HeadSettings())
        logprobs.sum().backward()
        num_inputs += predicting.numel()
        checksum += logprobs.sum().item()
    return num_inputs, checksum


def packed(groups: Sequences) -> tuple[int, float]:
    """Run all groups; return the number of inputs and the sum of all log-probs."""
    return run_packs([(prompt, [completion]) for prompt, completions in groups for completion in completions])


def shared(groups: Sequences) -> tuple[int, float]:
    """Run all groups; return the number of inputs and the sum of all log-probs."""
    return run_packs(groups)


def run_packs(sequences: Sequences) -> tuple[int, float]:
    """Run all groups; return the number of inputs and the sum of all log-probs."""
    from offbeat.learner.policy.logprobs import CompletionLogprobs
    from offbeat.learner.policy.packing import pack

    module = CompletionLogprobs(make_policy())
    num_inputs, checksum = 0, 0.0
    for of_micro_batch in micro_batches(sequences):
        batch = pack(of_micro_batch)
        logprobs, _, _ = module(batch.token_ids, batch.position_ids, batch.predictors, batch.targets, batch.spans, 1.0)
        logprobs.sum().backward()
        num_inputs += len(batch.token_ids)
        checksum += logprobs.sum().item()
    return num_inputs, checksum


def micro_batches(sequences: Sequences) -> list[Sequences]:
    """Split sequences in order into packs of at most `MICRO_BATCH_TOKENS` inputs."""
    from offbeat.learner.policy.packing import num_inputs

    result: list[Sequences] = []
    total = MICRO_BATCH_TOKENS
    for prompt, completions in sequences:
        size = len(prompt) + num_inputs(completions)
        if total + size > MICRO_BATCH_TOKENS:
            result.append([])
            total = 0
        result[-1].append((prompt, completions))
        total += size
    return result


VARIANTS: dict[str, Callable[[Sequences], tuple[int, float]]] = {"padded": padded, "packed": packed, "shared": shared}


def measure(variant: Callable[[Sequences], tuple[int, float]], groups: Sequences) -> Trial:
    """Time one pass over all groups, including the making of the model, which every variant does."""
    started, cpu_started = time.perf_counter(), time.process_time()
    num_inputs, checksum = variant(groups)
    return Trial(time.perf_counter() - started, time.process_time() - cpu_started, num_inputs, checksum)


def main() -> None:
    """Measure and print."""
    prepare_environment()
    groups = make_groups()
    num_tokens = sum(len(completion) for _, completions in groups for completion in completions)
    for variant in VARIANTS.values():
        measure(variant, groups[:1])
    trials: dict[str, list[Trial]] = {name: [] for name in VARIANTS}
    for _ in range(NUM_ROUNDS):
        for name, variant in VARIANTS.items():
            trials[name].append(measure(variant, groups))
    checksums = [trial.checksum for of_variant in trials.values() for trial in of_variant]
    np.testing.assert_allclose(checksums, checksums[0], rtol=1e-5)
    print_table(
        f"{NUM_GROUPS} groups of {GROUP_SIZE} completions, {num_tokens:,} tokens, {NUM_ROUNDS} interleaved rounds: "
        "median (min–max)",
        ("variant", "inputs/token", "tokens/s", "tokens/CPU s", "padded / CPU s"),
        [table_row(name, num_tokens, trials[name], trials["padded"]) for name in VARIANTS],
    )


def table_row(name: str, num_tokens: int, trials: Sequence[Trial], baseline: Sequence[Trial]) -> list[str]:
    """Return one line of the table: rates, and the CPU time of padded rows in the same round divided by this variant's."""
    return [
        name,
        f"{trials[0].num_inputs / num_tokens:.2f}",
        spread([num_tokens / trial.wall_s for trial in trials], 0),
        spread([num_tokens / trial.cpu_s for trial in trials], 0),
        spread([padded.cpu_s / trial.cpu_s for padded, trial in zip(baseline, trials, strict=True)]),
    ]


if __name__ == "__main__":
    main()
