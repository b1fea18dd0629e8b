"""Objectives under staleness: the quick start's task, trained on rollouts of one exact age.

    python -m tests.benchmarks.objectives --out runs.jsonl --jobs 2    # 72 runs of 100 steps; 20 minutes
    python -m tests.benchmarks.objectives --out runs.jsonl --objectives GSPO CISPO --staleness 0 16 --seeds 1 --steps 50

No sockets, no engine: the production trainer takes its optimizer steps on groups that a copy of the policy samples with the
weights of exactly `staleness` steps ago, or with the initial weights while there are fewer. Everything else is the quick
start's: model, data, reward, groups, learning rate. Settings that `OBJECTIVES` leaves open are the objective's own.

The final reward is the mean over the last `NUM_EVALUATIONS` steps: after each of them the current policy, not the stale one,
answers every held-out prompt once, at the temperature of training. A run whose gradient or log-probs are no longer finite has
diverged: it is counted, and has no final reward. A run whose reward fell to 0 has one, and the mean includes it.

With one optimizer step on each batch the recomputed policy is the policy, so the ratio of the decoupled anchor is always 1, and
only the correction of that GSPO acts, a truncated token weight.

A run is one line of the file, written when it ends. Runs that the file already has are not repeated.
"""

import argparse
import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.actor.rewards.functions import exact_match
from offbeat.common.processes.environment import prepare_environment
from offbeat.common.settings.checks import check
from offbeat.common.settings.config import Config, DataSection, eval_sets
from offbeat.common.settings.loading import load
from offbeat.common.weights.flat import WeightBuffer
from offbeat.deploy.local.quickstart.prepared import expand
from offbeat.learner.diagnostics.batch_metrics import Metrics
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.learner.leases.prompt_stream import PromptStream
from offbeat.learner.leases.prompts import Prompt, load_prompts
from offbeat.protocols.payload import Segment
from tests.benchmarks.measuring import print_table, processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offbeat.learner.training.trainer import Trainer

QUICKSTART = Path(__file__).parents[2] / "deploy" / "local" / "quickstart" / "quickstart.toml"

OBJECTIVES: dict[str, tuple[str, ...]] = {
    "REINFORCE": ("loss.objective=reinforce",),
    "GRPO": ("loss.objective=grpo",),
    "GSPO": ("loss.objective=gspo",),
    "GSPO-decoupled": ("loss.objective=gspo", "loss.anchor=decoupled", "loss.correction=token_tis"),
    "SAPO": ("loss.objective=sapo",),
    "CISPO": ("loss.objective=cispo",),
}
"""Settings of each objective on top of the quick start's."""
STALENESS = (0, 4, 16, 32)
NUM_SEEDS = 3
NUM_STEPS = 100
NUM_EVALUATIONS = 10


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings and the seed of a run."""

    objective: str
    settings: tuple[str, ...]
    staleness: int
    seed: int
    num_steps: int


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a run, one line of the file."""

    run: Run
    initial_reward: float
    """Reward of the policy that every run starts from, sampled like the final reward."""
    final_reward: float | None
    """None if the run diverged."""
    divergence: str
    """The error of a run that diverged; empty for a run that took all its steps."""
    lags: tuple[float, ...]
    """`lag/mean` of every step."""
    rewards: tuple[float, ...]
    """`reward/mean` of every step, the stale policy's."""
    clipped: tuple[float, ...]
    """`clip/fraction` of every step."""
    cpu_s: float
    """CPU time of the process, loading included."""


# Sampling


class WeightSnapshot(NamedTuple):
    """The weights after `policy_version` steps."""

    policy_version: int
    weights: WeightBuffer


class Sampler:
    """A copy of the policy with the weights loaded last."""

    def __init__(self, config: Config, tokenizer: "PreTrainedTokenizerBase") -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
        self._parameters = dict(self._model.named_parameters())
        self._sampling = config.rollout
        self._tokenizer = tokenizer
        self._policy_version = 0

    @torch.no_grad()
    def load(self, snapshot: WeightSnapshot) -> None:
        """Sample with these weights from now on."""
        for name, weight in snapshot.weights.views():
            self._parameters[name].copy_(weight)
        self._policy_version = snapshot.policy_version

    def rollouts(self, prompts: Sequence[Prompt], group_size: int, generator: torch.Generator) -> list[tuple[Rollout, ...]]:
        """Sample `group_size` completions of each prompt, with rewards. The prompts must be equally long."""
        prompt_ids = torch.from_numpy(np.stack([prompt.token_ids for prompt in prompts])).long()
        token_ids, logprobs = self._sample(prompt_ids, group_size, generator)
        rows = zip(token_ids.int().numpy(), logprobs.numpy(), strict=True)
        return [tuple(self._rollout(prompt, *next(rows)) for _ in range(group_size)) for prompt in prompts]

    @torch.inference_mode()
    def _sample(self, prompt_ids: Tensor, group_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample token ids and log-probs `[prompts * group_size, tokens]`; values after a row's end token are noise."""
        token_ids, logprobs = [], []
        output = self._model(input_ids=prompt_ids, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits.repeat_interleave(group_size, dim=0)
        cache.batch_repeat_interleave(group_size)
        is_ended = torch.zeros(len(logits), 1, dtype=torch.bool)
        while len(token_ids) < self._sampling.max_new_tokens and not is_ended.all():
            if token_ids:
                logits = self._model(input_ids=token_ids[-1], past_key_values=cache, use_cache=True).logits
            distribution = (logits[:, -1].float() / self._sampling.temperature).log_softmax(dim=-1)
            if distribution.isnan().any():
                raise FloatingPointError(f"log-probs under policy version {self._policy_version} are nan")
            token_ids.append(distribution.exp().multinomial(1, generator=generator))
            logprobs.append(distribution.gather(-1, token_ids[-1]))
            is_ended |= token_ids[-1] == self._tokenizer.eos_token_id
        return torch.cat(token_ids, dim=1), torch.cat(logprobs, dim=1)

    def _rollout(self, prompt: Prompt, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Rollout:
        is_end = token_ids == self._tokenizer.eos_token_id
        length = int(is_end.argmax()) + 1 if is_end.any() else len(token_ids)
        text = str(self._tokenizer.decode(token_ids[:length], skip_special_tokens=True))
        return Rollout(
            token_ids=token_ids[:length],
            behavior_logprobs=logprobs[:length],
            reward=exact_match(prompt.text, text, msgspec.json.decode(prompt.row)),
            finish_reason="stop" if is_end.any() else "length",
            segments=(Segment(self._policy_version, 0),),
        )


# One run


class Task(NamedTuple):
    """The prompts that every run samples from."""

    tokenizer: "PreTrainedTokenizerBase"
    prompts: list[Prompt]
    held_out: list[Prompt]


def train(run: Run) -> Result:
    """Take the steps of a run until it ends or diverges."""
    # Imported here: it imports transformers, which wants the environment prepared.
    from offbeat.learner.training.trainer import Trainer

    started = time.process_time()
    config = make_config(run)
    task = _load_task(config.model.path, config.data)
    sampler = Sampler(config, task.tokenizer)
    # Not the one that groups are sampled with: evaluating changes nothing about training.
    generator = torch.Generator().manual_seed(2 * run.seed + 1)
    initial_reward = evaluate(sampler, task, generator)
    rows: list[Metrics] = []
    evaluations: list[float] = []
    divergence = ""
    with contextlib.closing(Trainer(config)) as trainer:
        try:
            for metrics in steps(trainer, sampler, task, config, run.staleness):
                rows.append(metrics)
                if trainer.policy_version > run.num_steps - NUM_EVALUATIONS:
                    sampler.load(_snapshot(trainer))
                    evaluations.append(evaluate(sampler, task, generator))
        except FloatingPointError as error:
            divergence = str(error)
    return Result(
        run=run,
        initial_reward=initial_reward,
        final_reward=None if divergence else mean(evaluations),
        divergence=divergence,
        lags=_column(rows, "lag/mean"),
        rewards=_column(rows, "reward/mean"),
        clipped=_column(rows, "clip/fraction"),
        cpu_s=time.process_time() - started,
    )


def make_config(run: Run) -> Config:
    """Return the quick start's config with the settings of a run."""
    own = (f"run.seed={run.seed}", f"train.num_steps={run.num_steps}", f"staleness.max_staleness={run.staleness}")
    config = load(QUICKSTART, [*run.settings, *own])
    check(config)
    return expand(config)


@functools.cache
def _load_task(model: str, data: DataSection) -> Task:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = load_prompts(data.train_data, data.train_split, data, tokenizer).prompts
    held_out = load_prompts(eval_sets(data)[""], data.eval_split, data, tokenizer, setting="data.eval_data").prompts
    return Task(tokenizer, prompts, held_out)


def steps(trainer: "Trainer", sampler: Sampler, task: Task, config: Config, staleness: int) -> Iterator[Metrics]:
    """Yield the metrics of every step of a run, on groups sampled with the weights of `staleness` steps before."""
    stream = PromptStream(len(task.prompts), config.run.seed)
    generator = torch.Generator().manual_seed(2 * config.run.seed)
    snapshots: deque[WeightSnapshot] = deque(maxlen=staleness + 1)
    for _ in range(config.train.num_steps):
        snapshots.append(_snapshot(trainer))
        sampler.load(snapshots[0])
        prompts = [task.prompts[stream.next().prompt_id] for _ in range(config.train.groups_per_step)]
        rollouts = sampler.rollouts(prompts, config.rollout.group_size, generator)
        groups = [
            Group(
                lease_id=lease_id,
                prompt_id=prompt.prompt_id,
                prompt_token_ids=prompt.token_ids,
                rollouts=of_prompt,
                actor="sampler",
                generate_s=0.0,
            )
            for lease_id, (prompt, of_prompt) in enumerate(zip(prompts, rollouts, strict=True))
        ]
        [metrics] = trainer.train_batch(groups)
        yield metrics


def evaluate(sampler: Sampler, task: Task, generator: torch.Generator) -> float:
    """Return the mean reward of one completion of every held-out prompt."""
    return mean(rollout.reward for [rollout] in sampler.rollouts(task.held_out, 1, generator))


def _snapshot(trainer: "Trainer") -> WeightSnapshot:
    weights = WeightBuffer(trainer.layout())
    trainer.snapshot(dict(weights.views()))
    return WeightSnapshot(trainer.policy_version, weights)


def _column(rows: Sequence[Metrics], name: str) -> tuple[float, ...]:
    return tuple(cast("float", row[name]) for row in rows)


# All runs


def work(connection: Connection) -> None:
    """Answer each run that arrives with its result."""
    prepare_environment()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    while True:
        connection.send(train(connection.recv()))


def run_all(runs: Sequence[Run], out: Path, num_jobs: int) -> list[Result]:
    """Return the results of these runs; train those that `out` lacks, `num_jobs` at once, and append them to it."""
    results = {result.run: result for result in _read(out)}
    missing = deque(run for run in runs if run not in results)
    with processes(work, min(num_jobs, len(missing))) as busy, out.open("ab") as file:
        for connection in busy:
            connection.send(missing.popleft())
        while busy:
            for connection in cast("list[Connection]", wait(busy)):
                result = connection.recv()
                results[result.run] = result
                file.write(msgspec.json.encode(result) + b"\n")
                file.flush()
                print(_line(result), flush=True)
                if missing:
                    connection.send(missing.popleft())
                else:
                    busy.remove(connection)
    return [results[run] for run in runs]


def _read(out: Path) -> list[Result]:
    """Return the results in the file, but for a last line that a killed benchmark left unfinished."""
    results: list[Result] = []
    for line in out.read_bytes().splitlines() if out.exists() else ():
        with contextlib.suppress(msgspec.DecodeError):
            results.append(msgspec.json.decode(line, type=Result))
    return results


def _line(result: Result) -> str:
    run = result.run
    outcome = result.divergence or f"final reward {result.final_reward:.3f}"
    return f"{run.objective}, staleness {run.staleness}, seed {run.seed}: {outcome} ({result.cpu_s:.0f} CPU s)"


# The table


def report(results: Sequence[Result], num_steps: int) -> None:
    """Print the table."""
    objectives = list(dict.fromkeys(result.run.objective for result in results))
    columns = sorted({result.run.staleness for result in results})
    of_cell: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        of_cell.setdefault((result.run.objective, result.run.staleness), []).append(result)
    rows = [[name, *(_reward_cell(of_cell[name, staleness]) for staleness in columns)] for name in objectives]
    lags = [_lag_cell([result for result in results if result.run.staleness == staleness]) for staleness in columns]
    initial = mean(result.initial_reward for result in results)
    num_seeds = len({result.run.seed for result in results})
    print_table(
        f"Reward after {num_steps} steps, by staleness, {num_seeds} seeds: mean (min–max); {initial:.2f} before the first step",
        ("", *map(str, columns)),
        [*rows, ["lag measured", *lags]],
    )


def _reward_cell(results: Sequence[Result]) -> str:
    rewards = [result.final_reward for result in results if result.final_reward is not None]
    num_diverged = len(results) - len(rewards)
    cell = f"{mean(rewards):.2f} ({min(rewards):.2f}–{max(rewards):.2f})" if rewards else ""
    return ", ".join(filter(None, (cell, f"{num_diverged} of {len(results)} diverged" if num_diverged else "")))


def _lag_cell(results: Sequence[Result]) -> str:
    """Return the lowest and highest value of all steps but the first `staleness`, which had no older weights."""
    lags = [lag for result in results for lag in result.lags[result.run.staleness :]]
    return f"{min(lags):g}–{max(lags):g}" if lags else ""


def main() -> None:
    """Train what is missing, print the table."""
    parser = argparse.ArgumentParser(description="Which objective survives staleness?")
    parser.add_argument("--out", type=Path, required=True, help="file that runs are appended to, one JSON object a line")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each on one core")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--staleness", nargs="+", type=int, default=list(STALENESS), help="in optimizer steps")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="seeds 0 to SEEDS - 1 of each")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="optimizer steps of a run")
    arguments = parser.parse_args()
    if arguments.steps <= max(arguments.staleness):
        parser.error("--steps must be more than every --staleness: no step would be trained on rollouts that old")
    # For the processes, before they import torch. One core a run, and no GPU: at this size it would only be waited for.
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    # A whole seed before the next: what there is after an hour can be compared.
    runs = [
        Run(name, OBJECTIVES[name], staleness, seed, arguments.steps)
        for seed in range(arguments.seeds)
        for staleness in arguments.staleness
        for name in arguments.objectives
    ]
    report(run_all(runs, arguments.out, arguments.jobs), arguments.steps)


if __name__ == "__main__":
    main()
