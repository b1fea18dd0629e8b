"""The cost of log-probs computed in chunks, compared with making the logits of a whole batch, in the same run.

    python -m tests.benchmarks.logprob_paths [TOKENS]    # 8,192 tokens: 16 GiB of memory, 12 minutes of one core

Forward and backward of the output layer alone, float32, hidden size 1,024, vocabulary of 151,936, each in a separate
process:

    naive       all logits, log_softmax, gather
    2^N         token_logprobs with chunks of 2^N logits
    2^N, H      the same with the entropy, which is in the loss too

Memory is the process's peak above its memory before, including the gradients of states and weight, 0.6 GiB in every variant.
CPU seconds are of all threads, and depend less on other load than wall time.
"""

import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from offbeat.common.processes.environment import prepare_environment
from tests.benchmarks.measuring import print_table, processes

NUM_TOKENS = 8192
HIDDEN_SIZE = 1024
VOCAB_SIZE = 151_936
GIB = 1 << 30


class Variant(NamedTuple):
    """A way to compute the log-probs."""

    name: str
    chunk_logits: int | None
    """Logits in memory at once; None for all of them, with torch alone."""
    with_entropy: bool = False


class Trial(NamedTuple):
    """The cost of one forward and backward pass."""

    forward_s: float
    wall_s: float
    cpu_s: float
    peak_bytes: int


VARIANTS = (
    Variant("naive", None),
    Variant("2^21", 2**21),
    Variant("2^21, H", 2**21, with_entropy=True),
    Variant("2^24", 2**24),
    Variant("2^26", 2**26),
)


def measure(connection: Connection, variant: Variant, num_tokens: int) -> None:
    """Run one trial in this process and send its cost."""
    prepare_environment()
    import torch

    from offbeat.learner.policy.logprobs import HeadSettings, token_logprobs

    torch.manual_seed(0)
    states = torch.randn(num_tokens, HIDDEN_SIZE, requires_grad=True)
    weight = (torch.randn(VOCAB_SIZE, HIDDEN_SIZE) * 0.02).requires_grad_()
    token_ids = torch.randint(VOCAB_SIZE, (num_tokens,))
    upstream = torch.randn(num_tokens)
    # The first call of each kernel is slow.
    token_logprobs(states[:8], weight[:64], None, token_ids[:8] % 64, HeadSettings())[0].sum().backward()
    states.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")
    held = peak_bytes()
    started, cpu_started = time.perf_counter(), time.process_time()
    entropies = None
    if variant.chunk_logits is None:
        logits = torch.nn.functional.linear(states, weight)
        logprobs = logits.log_softmax(dim=-1).gather(1, token_ids[:, None]).squeeze(1)
        del logits
    else:
        settings = HeadSettings(max_chunk_logits=variant.chunk_logits, with_entropy=variant.with_entropy)
        logprobs, entropies = token_logprobs(states, weight, None, token_ids, settings)
    forward_s = time.perf_counter() - started
    ((logprobs * upstream).sum() + (0.0 if entropies is None else entropies.sum())).backward()
    ended, cpu_ended = time.perf_counter(), time.process_time()
    connection.send(Trial(forward_s, ended - started, cpu_ended - cpu_started, peak_bytes() - held))


def peak_bytes() -> int:
    """Return this process's peak memory since its mark was last cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Measure and print."""
    num_tokens = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_TOKENS
    trials = []
    for variant in VARIANTS:
        with processes(measure, 1, variant, num_tokens) as (connection,):
            trials.append(connection.recv())
    naive = trials[0]
    print_table(
        f"Log-probs of {num_tokens:,} tokens, hidden size {HIDDEN_SIZE:,}, vocabulary {VOCAB_SIZE:,}, forward and backward",
        ("path", "forward s", "s", "CPU s", "CPU s / naive", "peak GiB", "naive / peak"),
        [
            [
                variant.name,
                f"{trial.forward_s:.1f}",
                f"{trial.wall_s:.1f}",
                f"{trial.cpu_s:.1f}",
                f"{trial.cpu_s / naive.cpu_s:.2f}",
                f"{trial.peak_bytes / GIB:.2f}",
                f"{naive.peak_bytes / trial.peak_bytes:.1f}",
            ]
            for variant, trial in zip(VARIANTS, trials, strict=True)
        ],
    )


if __name__ == "__main__":
    main()
