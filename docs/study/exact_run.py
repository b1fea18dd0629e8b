"""One run of the study: the learner's own trainer on completions of exactly known staleness, in one process, without services.

    weights of version max(0, v - lag) -> sampler -> rewards -> groups -> Trainer.train_batch: version v + 1
                                                              every few steps: held-out prompts under version v + 1

Gradient, optimizer and metrics are those of `learner.training.trainer`; only the way from the weights to the groups is the
study's. Runs with the same seed have the same prompts and random numbers, whatever their method.
"""

import logging
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from docs.study.sampler import ExactSampler, Sampled
from docs.study.trials import Outcome, Point
from offbeat.common.settings.config import Config
from offbeat.common.weights.flat import WeightBuffer
from offbeat.lab.sweep.estimates import Curve
from offbeat.lab.sweep.plan import why_hopeless
from offbeat.learner.diagnostics.batch_metrics import Metrics
from offbeat.learner.leases.groups import EngineExperts, Group, Rollout
from offbeat.learner.training.trainer import Trainer
from offbeat.protocols.payload import Segment, encode_experts

logger = logging.getLogger(__name__)

EVALUATION_INTERVAL = 5
"""Optimizer steps between evaluations."""
NUM_EVALUATED = 128
"""Held-out prompts of an evaluation; the last one takes all of them."""
NUM_FINAL_EACH = 4
"""Completions of each held-out prompt in the last evaluation."""
MAX_ROUNDS = 4
"""Batches that are sampled for one step at most, where groups with equal rewards are dropped."""

_EVALUATION_SEED = 1_000_000_007


class TaskPrompt(NamedTuple):
    """A prompt of a task, with its reward."""

    token_ids: NDArray[np.int32]
    reward: Callable[[str], float]
    """Takes the completion as text."""


class RunResult(NamedTuple):
    """The end of a run: how it ended, after how many steps, with which reward, and the curve until there."""

    outcome: Outcome
    num_steps: int
    final_reward: float
    points: tuple[Point, ...]


def run_exactly(
    config: Config, prompts: Sequence[TaskPrompt], held_out: Sequence[TaskPrompt], *, lag: int, noise: float
) -> RunResult:
    """Take `train.num_steps` optimizer steps, each on completions of the weights of `lag` steps before, or of the first ones.

    `config` has one optimizer step per batch. Ends early where the gradient is not finite, or where the run is hopeless.
    """
    assert config.train.steps_per_batch * config.train.epochs_per_batch == 1, "a batch of several steps has several lags"
    with closing(Trainer(config)) as trainer:
        return ExactRun(config, trainer, prompts, held_out, lag=lag, noise=noise).run()


class ExactRun:
    """A run of a trainer, with the weights of its last `lag + 1` versions."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        prompts: Sequence[TaskPrompt],
        held_out: Sequence[TaskPrompt],
        *,
        lag: int,
        noise: float,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._prompts = prompts
        self._held_out = held_out
        self._lag = lag
        self._sampler = ExactSampler(config.model.path, noise=noise)
        self._exact = ExactSampler(config.model.path)
        """Sampler for evaluations, which have no noise."""
        layout = trainer.layout()
        self._versions = [WeightBuffer(layout) for _ in range(lag + 1)]
        """The weights of the last `lag + 1` versions: version v is at `v % (lag + 1)`."""
        self._order = np.random.default_rng(config.run.seed).permutation(len(prompts))
        self._num_used = 0
        """Prompts that groups were sampled for."""

    def run(self) -> RunResult:
        """Train to the end, to the first gradient or logit that is not finite, or until the run is hopeless."""
        self._keep_version()
        points = [Point(0, self._evaluate(NUM_EVALUATED, num_each=1))]
        outcome: Outcome = "finished"
        since: list[Metrics] = []
        try:
            for step in range(self._config.train.num_steps):
                since += self._trainer.train_batch(self.sample_groups(max(0, step - self._lag), draw=step))
                self._keep_version()
                if (step + 1) % EVALUATION_INTERVAL:
                    continue
                points.append(_point(step + 1, self._evaluate(NUM_EVALUATED, num_each=1), since))
                since = []
                held_out = Curve([point.step for point in points], [point.held_out for point in points])
                if why_hopeless(held_out, lag=self._lag):
                    outcome = "hopeless"
                    break
            final = self._evaluate(len(self._held_out), num_each=NUM_FINAL_EACH)
        except FloatingPointError as error:
            logger.info("%s", error)
            outcome, final = "diverged", 0.0
        return RunResult(outcome, self._trainer.policy_version, final, tuple(points))

    def sample_groups(self, version: int, *, draw: int) -> list[Group]:
        """Return the groups of a step, sampled by one of the versions that are kept; `draw` numbers the random draws of a seed.

        Where the objective drops groups with equal rewards, up to `MAX_ROUNDS` batches are sampled. If too few others are
        found, the rest are of the dropped ones, as many as are needed.
        """
        per_step = self._config.train.groups_per_step
        self._sampler.load(self._weights(version))
        generator = _generator(self._config.run.seed, draw)
        kept: list[Group] = []
        passed_over: list[Group] = []
        for _ in range(MAX_ROUNDS):
            for group in self._sample_round(version, generator):
                drops = self._config.loss.zero_variance == "drop" and len({one.reward for one in group.rollouts}) == 1
                (passed_over if drops else kept).append(group)
            if len(kept) >= per_step:
                break
        return [*kept, *passed_over][:per_step]

    def _keep_version(self) -> None:
        self._trainer.snapshot(dict(self._weights(self._trainer.policy_version).views()))

    def _weights(self, policy_version: int) -> WeightBuffer:
        return self._versions[policy_version % len(self._versions)]

    def _sample_round(self, version: int, generator: torch.Generator) -> list[Group]:
        num_groups, rollout = self._config.train.groups_per_step, self._config.rollout
        chosen = [int(self._order[(self._num_used + index) % len(self._order)]) for index in range(num_groups)]
        first_lease, self._num_used = self._num_used, self._num_used + num_groups
        sampled = self._sampler.sample(
            [self._prompts[index].token_ids for index in chosen],
            num_each=rollout.group_size,
            max_new_tokens=rollout.max_new_tokens,
            generator=generator,
        )
        texts = self._sampler.texts(sampled)
        groups: list[Group] = []
        for place, index in enumerate(chosen):
            own = slice(place * rollout.group_size, (place + 1) * rollout.group_size)
            prompt = self._prompts[index]
            rollouts = [_rollout(one, prompt.reward(text), version) for one, text in zip(sampled[own], texts[own], strict=True)]
            group = Group(first_lease + place, index, prompt.token_ids, tuple(rollouts), "exact", generate_s=0.0)
            if self._config.loss.routing_replay == "sampled":
                experts = self._sampler.experts(prompt.token_ids, sampled[own])
                num_tokens, num_layers, top_k = experts.shape
                group = group._replace(experts=EngineExperts(encode_experts(experts), (num_tokens, num_layers, top_k)))
            groups.append(group)
        return groups

    def _evaluate(self, num_prompts: int, *, num_each: int) -> float:
        """Return the mean reward of the current weights on the first held-out prompts, at temperature 1."""
        self._exact.load(self._weights(self._trainer.policy_version))
        prompts = self._held_out[:num_prompts]
        sampled = self._exact.sample(
            [prompt.token_ids for prompt in prompts],
            num_each=num_each,
            max_new_tokens=self._config.rollout.max_new_tokens,
            generator=_generator(_EVALUATION_SEED, num_each),
        )
        texts = self._exact.texts(sampled)
        return statistics.fmean(prompts[index // num_each].reward(text) for index, text in enumerate(texts))


def _generator(seed: int, draw: int) -> torch.Generator:
    """Return random numbers that depend on these alone: methods that sample differently do not drift apart."""
    return torch.Generator().manual_seed(seed * 1_000_003 + draw)


def _rollout(sampled: Sampled, reward: float, policy_version: int) -> Rollout:
    return Rollout(
        sampled.token_ids,
        sampled.behavior_logprobs,
        reward,
        "stop" if sampled.is_ended else "length",
        (Segment(policy_version, 0),),
    )


def _point(step: int, held_out: float, since: Sequence[Metrics]) -> Point:
    """Return the evaluation with the extremes and means of the steps' metrics, rounded to what a plot can show."""

    def values(name: str) -> list[float]:
        return [float(metrics[name]) for metrics in since if name in metrics]  # pyright: ignore[reportArgumentType]

    def mean(name: str) -> float | None:
        return _rounded(statistics.fmean(found)) if (found := values(name)) else None

    return Point(
        step=step,
        held_out=_rounded(held_out),
        reward=mean("reward/mean"),
        ess_sequence=_rounded(min(values("ess/sequence"))),
        ess_token=_rounded(min(values("ess/token"))),
        clip_fraction=mean("clip/fraction"),
        grad_norm=_rounded(max(values("loss/grad_norm"))),
        kl=mean("kl/behavior_policy_k3"),
        entropy=mean("entropy/mean"),
        length=mean("length/mean"),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
