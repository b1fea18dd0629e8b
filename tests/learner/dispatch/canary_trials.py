"""The canary's operating characteristic: engines with noise alone, and engines with wrong weights and the same noise.

    python -m tests.learner.dispatch.canary_trials     # the tables of docs/reliability.md; 1 minute

Noise is drawn per token and update, of the sizes that are published for engines against learners. Wrong weights are those of
real networks (small Qwen3s whose logits spread as a trained model's do), in float32; the noise is added to their log-probs.
"""

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from offbeat.learner.dispatch.canary import Canary, canary_token_ids

Noise = Callable[[Generator, int], NDArray[np.float64]]
LEARNING_RATE = 1e-2
VOCABULARY = 128
CONSTANTS = {"float32": 1e-3, "bfloat16": 0.5}
"""The rule before: the largest difference against a constant."""


def _heavy(rng: Generator, num_tokens: int, rms: float) -> NDArray[np.float64]:
    """Return noise with the tails of Student's t with 3 degrees of freedom."""
    return rng.standard_t(3, num_tokens) * rms / np.sqrt(3)


def _bfloat16(rng: Generator, num_tokens: int, rms: float = 0.04, odd_share: float = 0.2) -> NDArray[np.float64]:
    noise = _heavy(rng, num_tokens, rms)
    if rng.random() < odd_share:
        noise[rng.integers(num_tokens)] += rng.choice((-0.5, 0.5))
    return noise


def _mixture(rng: Generator, num_tokens: int) -> NDArray[np.float64]:
    """Return noise in which one token in 20 goes to another expert than the learner sends it to."""
    return _bfloat16(rng, num_tokens) + rng.laplace(0, 0.4, num_tokens) * (rng.random(num_tokens) < 0.05)


def _tf32(rng: Generator, num_tokens: int) -> NDArray[np.float64]:
    sizes = np.exp(rng.uniform(np.log(1e-4), np.log(2e-3), num_tokens))
    return sizes * rng.choice((-1.0, 1.0), num_tokens)


class Engine(NamedTuple):
    """A kind of engine: the dtype of its weights, and its noise."""

    dtype: str
    noise: Noise


ENGINES: Mapping[str, Engine] = {
    "float32": Engine("float32", lambda rng, n: _heavy(rng, n, 2e-6)),
    "float32, TF32 kernels": Engine("float32", _tf32),
    "bfloat16": Engine("bfloat16", _bfloat16),
    "bfloat16, mixture of experts": Engine("bfloat16", _mixture),
    "fp8 of bfloat16": Engine("bfloat16", lambda rng, n: _heavy(rng, n, 0.12)),
}

# Networks


def make_model(*, is_mixture: bool) -> PreTrainedModel:
    """Return a Qwen3 with tied heads whose logits have a standard deviation of about 3."""
    torch.manual_seed(5)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "initializer_range": 0.25,
    }
    if is_mixture:
        config = Qwen3MoeConfig(**shape, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
        return Qwen3MoeForCausalLM(config).eval()
    return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()


def updated(model: PreTrainedModel, learning_rate: float = LEARNING_RATE) -> PreTrainedModel:
    """Return the next version: a first step of Adam changes each weight by the learning rate, up or down."""
    torch.manual_seed(6)
    newer = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter += learning_rate * torch.randn_like(parameter).sign()
    return newer


@torch.no_grad()
def score(model: PreTrainedModel, token_ids: NDArray[np.int32], head: torch.Tensor | None = None) -> NDArray[np.float64]:
    """Return the log-probs of tokens 1.., `[tokens - 1]`; with `head` `[vocabulary, hidden]` instead of the model's."""
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    hidden = model.base_model(ids[:, :-1]).last_hidden_state[0]
    weight = _head(model) if head is None else head
    logprobs = (hidden @ weight.T).float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].double().numpy()


def _head(model: PreTrainedModel) -> torch.Tensor:
    return model.get_parameter("model.embed_tokens.weight")


class Case(NamedTuple):
    """The log-probs of the learner and of a broken engine for the canary, without noise."""

    name: str
    files: NDArray[np.float64]
    right: NDArray[np.float64]
    wrong: NDArray[np.float64]


@cache
@torch.no_grad()
def canary(*, is_mixture: bool = False) -> NDArray[np.int32]:
    """Return the canary of a text of 64 tokens that the model writes: prompts are likely to a trained model."""
    model = make_model(is_mixture=is_mixture)
    torch.manual_seed(4)
    ids = torch.tensor([[1]])
    for _ in range(63):
        ids = torch.cat([ids, model(ids).logits[:, -1].softmax(-1).multinomial(1)], dim=1)
    return canary_token_ids([ids[0].numpy().astype(np.int32)], 128)


def _layer(model: PreTrainedModel, index: int) -> torch.nn.Module:
    return model.base_model.layers[index]  # pyright: ignore


@cache
@torch.no_grad()
def cases() -> tuple[Case, ...]:
    """Return every kind of wrong weights."""
    found = []
    for is_mixture in (False, True):
        old = make_model(is_mixture=is_mixture)
        new = updated(old)
        ids = canary(is_mixture=is_mixture)
        files, right = score(old, ids), score(new, ids)
        old_head, new_head = (_head(model).clone() for model in (old, new))
        kind = "mixture" if is_mixture else "dense"

        def add(name: str, wrong: NDArray[np.float64]) -> None:
            found.append(Case(f"{name}, {kind}", files, right, wrong))  # noqa: B023

        add("no update", files)
        add("stale tied head", score(new, ids, old_head))
        stale = copy.deepcopy(new)
        _layer(stale, 1).load_state_dict(_layer(old, 1).state_dict())
        add("one stale layer", score(stale, ids))
        swapped = new_head.clone()
        token = int(ids[20])
        other = next(one for one in range(VOCABULARY) if one not in ids)
        swapped[[token, other]] = swapped[[other, token]]
        add("two rows of the head swapped", score(new, ids, swapped))
        if is_mixture:
            mixed = copy.deepcopy(new)
            weights = dict(_layer(mixed, 1).named_parameters())
            for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
                weights[name][[0, 1]] = weights[name][[1, 0]].clone()
            add("two experts swapped", score(mixed, ids))
            halves = copy.deepcopy(new)
            gate_up = dict(_layer(halves, 1).named_parameters())["mlp.experts.gate_up_proj"]
            gate_up.copy_(gate_up.roll(gate_up.shape[1] // 2, dims=1))
            add("experts' gate and up swapped", score(halves, ids))
    return tuple(found)


# Trials


class Trial:
    """One actor with an engine's noise, and the learner's canary."""

    def __init__(self, engine: Engine, seed: int, files: NDArray[np.float64], *, sends_floor: bool = True) -> None:
        self.excesses: list[float] = []
        self._engine = engine
        self._rng = np.random.default_rng(seed)
        self._version = -1
        self._canary = Canary(
            canary(),
            dtype=engine.dtype,
            file_logprobs=files.astype(np.float32),
            tolerance=lambda: None,
            record=lambda row: None,
        )
        if sends_floor:
            self._canary.measure_floor("a", self._noisy(files))

    def is_caught(self, case: Case, num_comparisons: int) -> bool:
        """Return whether the actor is quarantined for these weights within so many comparisons."""
        return any(self.is_wrong(case.right, case.wrong) for _ in range(num_comparisons))

    def is_wrong(self, learner: NDArray[np.float64], engine: NDArray[np.float64]) -> bool:
        """Return whether the actor is quarantined for its score of the next version."""
        self._version += 1
        self._canary.add(self._version, learner.astype(np.float32))
        verdict = self._canary.judge("a", self._version, self._noisy(engine))
        assert verdict is not None
        return verdict.flaw is not None

    def would_be_wrong(self, learner: NDArray[np.float64], engine: NDArray[np.float64]) -> bool:
        """Return the judgement of the rule before, on the first half of the canary, which was all of it."""
        half = len(canary()) // 2 - 1
        difference = self._noisy(engine) - learner.astype(np.float32)
        return bool(np.abs(difference[:half]).max() > CONSTANTS[self._engine.dtype])

    def _noisy(self, logprobs: NDArray[np.float64]) -> NDArray[np.float32]:
        return (logprobs + self._engine.noise(self._rng, len(logprobs))).astype(np.float32)


def main() -> None:
    """Print both tables in Markdown."""
    zeros = np.zeros(len(canary()) - 1)
    print("| engine | quarantines in 40,000 updates of 40 actors | with a constant |\n|---|---|---|")
    for name, engine in ENGINES.items():
        trials = [Trial(engine, seed, zeros) for seed in range(40)]
        now = sum(trial.is_wrong(zeros, zeros) for trial in trials for _ in range(1000))
        before = sum(trial.would_be_wrong(zeros, zeros) for trial in trials for _ in range(1000))
        print(f"| {name} | {now} | {before:,} |")
    print("\n| wrong weights | nat on average | " + " | ".join(ENGINES) + " |\n|---|---" + "|---" * len(ENGINES) + "|")
    for case in cases():
        cells = []
        for engine in ENGINES.values():
            caught = [
                sum(Trial(engine, seed, case.files).is_caught(case, comparisons) for seed in range(100))
                for comparisons in (1, 2)
            ]
            trials = [Trial(engine, seed, case.files) for seed in range(100)]
            before = sum(trial.would_be_wrong(case.right, case.wrong) for trial in trials)
            cells.append(f"{caught[0]}, {caught[1]} ({before})")
        mean = np.abs(case.right - case.wrong).mean()
        print(f"| {case.name} | {mean:.2g} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
