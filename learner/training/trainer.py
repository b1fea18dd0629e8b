"""The trainer: takes optimizer steps on groups that older policies sampled, so that actors need not wait for it.

A batch of groups passes through these files, all but the first once for each optimizer step:

| what happens | where | result |
|---|---|---|
| rewards shaped, advantages taken, completions packed, frozen networks run | `preparation.py` | micro-batches of this rank |
| the policy runs on a micro-batch | `policy/networks.py` | log-probs with a gradient |
| token losses, their correction and aggregation, then `backward` | `step_loss.py`, `objectives/` | gradient |
| learning rate, clip, optimizer step | here, in `_take_step` | new weights |
| the numbers about the step | `diagnostics/step_table.py` | a row of metrics |
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from offbeat.common.settings.config import Config
from offbeat.common.settings.learning_sections import LossSection
from offbeat.common.weights.flat import make_layout, tensor_dtype
from offbeat.learner.calibration.calibration import load_calibration
from offbeat.learner.calibration.noise_floor import Differences
from offbeat.learner.diagnostics.batch_metrics import Metrics, truncated_ess
from offbeat.learner.diagnostics.step_table import GradientDirection, StepLoss, step_metrics
from offbeat.learner.leases.groups import Group
from offbeat.learner.objectives.aggregation import aggregate
from offbeat.learner.objectives.bands import USUAL_NOISE
from offbeat.learner.objectives.kl import KL_HORIZON, adapt_kl_coefficient
from offbeat.learner.objectives.objective import Objective, make_objective
from offbeat.learner.policy import process_group
from offbeat.learner.policy.loading import gather_policy, write_policy
from offbeat.learner.policy.lora import base_shapes
from offbeat.learner.policy.networks import Networks, Scored, write_snapshot
from offbeat.learner.training import trainer_state
from offbeat.learner.training.batching import TrainingRow
from offbeat.learner.training.checkpoints import put_in_place
from offbeat.learner.training.preparation import Preparation, PreparedMicroBatch, add_lag, explained_variance
from offbeat.learner.training.step_loss import compute_loss, find_constants, value_errors
from offbeat.protocols.messages import TensorSpec


class TrainingStep(NamedTuple):
    """The inputs of one optimizer step."""

    groups: Sequence[Group]
    rows: Sequence[TrainingRow]
    """All completions of the groups."""
    micro_batches: Sequence[PreparedMicroBatch]
    """This rank's share of the rows."""

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all rows, those of other ranks included."""
        return sum(len(row.rollout.token_ids) for row in self.rows)


class Trainer:
    """The policy under DeepSpeed, on this rank. Unless said otherwise every rank calls every method, in the same order."""

    def __init__(self, config: Config) -> None:
        """Load the models of the run. Raises ValueError for a model that cannot be trained."""
        self._config = config
        self._train = config.train
        path = config.loss.noise_floor
        self._noise = load_calibration(path).noise if path else None
        self._objective = self._make_objective(config.loss)
        self._preparation = Preparation(config, self._objective)
        place = process_group.join_process_group()
        self.rank, self.world_size, self.device = place
        process_group.require_same_settings(config)
        self.policy_version = 0
        """Optimizer steps taken, including those before a loaded checkpoint."""
        torch.manual_seed(config.run.seed)
        self.networks = Networks(config, place)
        self._adaptive = trainer_state.AdaptiveState(kl_coefficient=config.kl.loss_coef or config.kl.reward_coef)
        self._direction = GradientDirection()
        if self.device.type == "cuda":
            process_group.take_memory(self.device)

    def train_batch(self, groups: Sequence[Group]) -> list[Metrics]:
        """Take `train.steps_per_batch` optimizer steps, each on the next `train.groups_per_step` of `groups`.

        These steps are one epoch. It is repeated `train.epochs_per_batch` times, against the same frozen log-probs and with
        the same advantages. Every rank passes the same groups and takes its own share of their rows. Returns the metrics of
        each step, the same on every rank; times are this rank's.
        """
        per_step, num_steps = self._train.groups_per_step, self._train.steps_per_batch
        if len(groups) != per_step * num_steps:
            raise ValueError(
                f"train_batch got {len(groups)} groups; train.groups_per_step * train.steps_per_batch = {per_step * num_steps}"
            )
        by_step = [groups[start : start + per_step] for start in range(0, len(groups), per_step)]
        rows: list[list[TrainingRow]] = []
        for index, of_step in enumerate(by_step):
            of_rows, running = self._preparation.make_rows(of_step, self.policy_version + index, self._adaptive.rewards)
            rows.append(of_rows)
            self._adaptive = msgspec.structs.replace(self._adaptive, rewards=running)
        start = time.perf_counter()
        # Before the first step: the proximal policy is the policy that the whole batch starts from.
        steps = [TrainingStep(*of_step, self._prepare(of_step[1])) for of_step in zip(by_step, rows, strict=True)]
        prepare_s = time.perf_counter() - start
        metrics = [
            self._take_step(step, num_steps_before=epoch * num_steps)
            for epoch in range(self._train.epochs_per_batch)
            for step in steps
        ]
        for index, of_step in enumerate(metrics):
            of_step["time/prepare_s"] = prepare_s if index == 0 else 0.0
        return metrics

    def tune(self, *, clip_low: float | None, clip_high: float | None, learning_rate: float) -> None:
        """Train with these settings from the next batch on; None for an objective that does not clip."""
        loss = msgspec.structs.replace(self._config.loss, clip_low=clip_low, clip_high=clip_high)
        self._objective = self._make_objective(loss)
        self._train = msgspec.structs.replace(self._train, learning_rate=learning_rate)

    def gradient(self, groups: Sequence[Group]) -> tuple[Metrics, Tensor]:
        """Compute the metrics and the gradient of a step on `train.groups_per_step` groups without taking the step.

        The gradient is before clipping, one float32 vector in CPU memory, made of the parameters that `full_gradients` lists.
        Weights, optimizer and adaptive state stay as they are.
        """
        if len(groups) != self._train.groups_per_step:
            raise ValueError(f"gradient got {len(groups)} groups; train.groups_per_step = {self._train.groups_per_step}")
        rows, _ = self._preparation.make_rows(groups, self.policy_version, self._adaptive.rewards)
        step = TrainingStep(groups, rows, self._prepare(rows))
        step, loss = self._compute_gradient(step)
        return self._step_metrics(step, loss), self.networks.take_gradient()

    def layout(self) -> tuple[TensorSpec, ...]:
        """List the weights that `snapshot` copies: Hugging Face names, the model's order, tied weights once; no collective."""
        return make_layout(base_shapes(self.networks.policy), tensor_dtype(self._config.model.dtype))

    def snapshot(self, views: dict[str, Tensor] | None) -> None:
        """Copy the current weights into these views by name, as `write_snapshot` does."""
        write_snapshot(self.networks.policy, views, self.networks.place.device)

    def score(self, token_ids: Sequence[int]) -> Scored:
        """Score at least two given tokens."""
        return self.networks.score(token_ids)

    def compare(self, groups: Sequence[Group]) -> Differences:
        """Compare the policy's log-probs with those of the engines that sampled the groups, computed as in training.

        Completions are in any order, the same on every rank.
        """
        tokens: list[Tensor] = []
        completions: list[Tensor] = []
        rows, _ = self._preparation.make_rows(groups, self.policy_version, self._adaptive.rewards)
        for micro_batch, _, advantages, _ in self._prepare(rows):
            logprobs = self.networks.run(micro_batch.pack).logprobs
            behavior = micro_batch.behavior_logprobs.double()
            log_ratios = logprobs.double() - behavior
            tokens.append(torch.stack([log_ratios, advantages.double(), behavior], dim=-1)[micro_batch.completion_mask])
            completions.append(torch.stack([micro_batch.completion_mask.sum(dim=-1), micro_batch.groups], dim=-1))
        num_alike = self.networks.num_alike
        log_ratios, advantages, behavior = process_group.gather_rows(torch.cat(tokens), num_alike=num_alike).unbind(dim=-1)
        lengths, numbers = process_group.gather_rows(torch.cat(completions), num_alike=num_alike).unbind(dim=-1)
        return Differences(lengths.numpy(), log_ratios.numpy(), advantages.numpy(), numbers.numpy(), behavior.numpy())

    def save_checkpoint(self, folder: Path, extra: bytes) -> None:
        """Write everything that continues this run, and rank 0's `extra`. `CheckpointFailedError` leaves no rank behind."""
        trainer_state.save_state(
            folder, self.networks.engines, self._describe_checkpoint(), self._adaptive, extra, rank=self.rank
        )

    def checkpoint_bytes(self) -> int:
        """Return the most bytes that `save_checkpoint` writes beside the `extra`; no collective."""
        return trainer_state.largest_state(self.networks.engines)

    def load_checkpoint(self, folder: Path) -> bytes:
        """Continue from the checkpoint in `folder`; return the `extra` saved with it."""
        expected = self._describe_checkpoint()
        version, adaptive, extra = trainer_state.load_state(folder, self.networks.engines, expected, rank=self.rank)
        # A coefficient that does not adapt is a setting, which may have changed since.
        if self._config.kl.target is None:
            adaptive = msgspec.structs.replace(adaptive, kl_coefficient=self._adaptive.kl_coefficient)
        self._adaptive, self.policy_version = adaptive, version
        return extra

    def save_model(self, folder: Path) -> None:
        """Write weights, config and tokenizer as transformers reads them; rank 0 holds the whole model meanwhile.

        `folder` appears whole, in place of an older one. Raises `CheckpointFailedError` on every rank where rank 0 cannot.
        """
        policy, is_first = self.networks.policy, self.rank == 0
        state = gather_policy(policy, is_keeper=is_first)

        def write(partial: Path) -> None:
            if is_first:
                with trainer_state.disk_errors(partial):
                    write_policy(policy, state, partial, tokenizer=self._config.model.path)

        trainer_state.write_folder(folder, write, put_in_place, rank=self.rank)

    def close(self) -> None:
        """Free the engines. The process group lives as long as the process."""
        for engine in self.networks.engines:
            engine.destroy()

    def _make_objective(self, loss: LossSection) -> Objective:
        return make_objective(loss, USUAL_NOISE if self._noise is None else self._noise.every.of_length)

    def _prepare(self, rows: Sequence[TrainingRow]) -> list[PreparedMicroBatch]:
        return self._preparation.prepare(rows, self.networks, kl_coefficient=self._adaptive.kl_coefficient)

    # A step

    def _take_step(self, step: TrainingStep, *, num_steps_before: int) -> Metrics:
        """Take one optimizer step; `num_steps_before` steps of earlier epochs make its completions staler by as many."""
        start = time.perf_counter()
        step = step._replace(micro_batches=[add_lag(prepared, num_steps_before) for prepared in step.micro_batches])
        step, loss = self._compute_gradient(step)
        rate = self._learning_rate(loss)
        cosine = self._direction.compare(self.networks.gradients())
        grad_norm = self.networks.step(rate)
        self._adapt_kl_coefficient(loss, num_rows=len(step.rows))
        metrics = self._step_metrics(step, loss)
        # Before the critic's updates: rewards that break both are reported with the leases that brought them.
        _require_finite(grad_norm, self.policy_version, metrics)
        of_critic = self._train_critic(step, loss)
        self.policy_version += 1
        if cosine is not None:
            metrics["loss/grad_cosine"] = cosine
        train_s = time.perf_counter() - start
        metrics |= of_critic | {"loss/grad_norm": grad_norm, "loss/learning_rate": rate, "time/train_s": train_s}
        packs = [prepared.micro_batch.pack for prepared in step.micro_batches]
        return metrics | self.networks.utilization(packs, train_s, runs_before=self._objective.m2_threshold is not None)

    def _compute_gradient(self, step: TrainingStep) -> tuple[TrainingStep, StepLoss]:
        """Accumulate the gradient of a step's loss over its micro-batches and all ranks.

        Returns the step with the broken completions outside the masks of its micro-batches.
        """
        objective, networks = self._objective, self.networks
        denominator = objective.denominator(num_groups=len(step.groups), num_rows=len(step.rows), num_tokens=step.num_tokens)
        constants = find_constants(step.micro_batches, objective, networks)
        tables: list[Tensor] = []
        sound: list[PreparedMicroBatch] = []
        sums: dict[str, Tensor] = {}
        for index, prepared in enumerate(step.micro_batches):
            networks.engine.set_gradient_accumulation_boundary(index == len(step.micro_batches) - 1)
            loss = compute_loss(
                prepared,
                networks.run_trained(prepared.micro_batch.pack),
                objective,
                kl=self._config.kl,
                kl_coefficient=self._adaptive.kl_coefficient,
                critic=self._config.critic,
                constants=constants,
            )
            # DeepSpeed averages gradients over ranks; the loss is a sum over all of them. Of ranks that share a pack each has
            # the gradient through its own tokens.
            networks.engine.backward(loss.total * (self.world_size / denominator))
            tables.append(loss.table)
            sound.append(prepared._replace(micro_batch=prepared.micro_batch._replace(completion_mask=loss.completion_mask)))
            sums = {name: sums.get(name, 0) + value.double() for name, value in loss.sums.items()}
        of_ranks = process_group.gather_tensors(torch.stack(list(sums.values())), num_alike=networks.num_alike)
        table = process_group.gather_rows(torch.cat(tables), num_alike=networks.num_alike)
        totals = dict(zip(sums, of_ranks.sum(dim=0).tolist(), strict=True))
        return step._replace(micro_batches=sound), StepLoss(table, denominator, totals, self._adaptive.kl_coefficient)

    def _train_critic(self, step: TrainingStep, loss: StepLoss) -> Metrics:
        """Take the optimizer steps of a critic with a trunk of its own, if there is one; return the metrics of the first.

        Raises FloatingPointError for an update whose gradient has no norm.
        """
        critic, settings = self.networks.critic, self._config.critic
        if critic is None:
            return {}
        metrics: Metrics = {}
        for _ in range(settings.updates_per_step):
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for index, prepared in enumerate(step.micro_batches):
                critic.engine.set_gradient_accumulation_boundary(index == len(step.micro_batches) - 1)
                micro_batch = prepared.micro_batch
                values, mask = critic.run_trained(micro_batch.pack), micro_batch.completion_mask
                errors = value_errors(prepared, values, mask, settings)
                aggregated = aggregate(errors, mask, micro_batch.weights, mode=self._objective.aggregation)
                critic.engine.backward(aggregated * (self.world_size / loss.denominator))
                total += errors.detach().sum()
            norm = critic.step(settings.learning_rate_factor * self._train.learning_rate)
            of_ranks = process_group.gather_tensors(total, num_alike=self.networks.num_alike)
            value_loss = float(of_ranks.sum()) / loss.num_tokens
            if not _is_finite_norm(norm):
                raise FloatingPointError(
                    f"the critic's gradient norm in optimizer step {self.policy_version} is {norm} (value loss {value_loss}): "
                    "the critic's weights cannot be trusted any more"
                )
            metrics = metrics or {"loss/value": value_loss, "loss/value_grad_norm": norm}
        return metrics

    def _step_metrics(self, step: TrainingStep, loss: StepLoss) -> Metrics:
        metrics = step_metrics(loss, step.groups, self.policy_version, self._objective, self._noise)
        explained = explained_variance(step.micro_batches, num_alike=self.networks.num_alike)
        if explained is not None:
            metrics["loss/explained_variance"] = explained
        return metrics | self.networks.take_replay_metrics()

    def _adapt_kl_coefficient(self, loss: StepLoss, *, num_rows: int) -> None:
        """Move the KL's coefficient after a step of `num_rows` completions, if `kl.target` is set."""
        kl = self._config.kl
        if kl.target is None:
            return
        measured = loss.means["kl/reward" if kl.reward_coef else "kl/reference"]
        coefficient = adapt_kl_coefficient(
            self._adaptive.kl_coefficient, measured, target=kl.target, num_steps=num_rows, horizon=KL_HORIZON
        )
        self._adaptive = msgspec.structs.replace(self._adaptive, kl_coefficient=coefficient)

    def _learning_rate(self, loss: StepLoss) -> float:
        """Return the learning rate of the step that has this loss."""
        train = self._train
        scheduled = learning_rate(
            self.policy_version,
            peak=train.learning_rate,
            schedule=train.lr_schedule,
            warmup_steps=train.warmup_steps,
            num_steps=train.num_steps,
        )
        if self.policy_version < self._config.critic.alone_until:
            return 0.0
        if train.on_policy_ess is None:
            return scheduled
        return scheduled * ess_scale(truncated_ess(loss.table), on_policy_ess=train.on_policy_ess)

    def _describe_checkpoint(self) -> trainer_state.CheckpointMeta:
        return trainer_state.CheckpointMeta(
            self.policy_version,
            self.world_size,
            self.networks.zero_stage,
            self._config.model.dtype,
            self._config.lora,
            self._config.advantage.baseline == "critic",
            self.networks.critic is not None,
        )


def _require_finite(grad_norm: float, policy_version: int, metrics: Metrics) -> None:
    """Raise FloatingPointError for a gradient that has no norm, with the metrics that point to its cause."""
    if _is_finite_norm(grad_norm):
        return
    broken = metrics.get("broken/leases")
    raise FloatingPointError(
        f"the gradient norm of optimizer step {policy_version} is {grad_norm} (loss {metrics['loss/policy']}, "
        f"largest token log ratio {metrics['ratio/token_log_abs_max']}; leases with broken log-probs: "
        f"{', '.join(broken) if isinstance(broken, dict) else 'none'}): the weights cannot be trusted any more"
    )


def _is_finite_norm(grad_norm: float) -> bool:
    # Under some ZeRO stages DeepSpeed skips the step and reports a norm of -1.
    return 0 <= grad_norm < math.inf


def learning_rate(
    step: int, *, peak: float, schedule: Literal["constant", "linear", "cosine"], warmup_steps: int, num_steps: int
) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0: linear warm-up to `peak`, then the schedule.

    Step `warmup_steps` is the first at `peak`; `linear` and `cosine` fall from there to 0 at `num_steps`, the first step that
    is not taken.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "linear":
        return peak * max(0.0, 1 - progress)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def ess_scale(ess: float, *, on_policy_ess: float) -> float:
    """`min(1, sqrt(ess / on_policy_ess))`: the factor of the learning rate of a step with this effective sample size.

    Both are shares of the step's completions, of sequence weights pi / mu up to 8: VCPO,
    https://arxiv.org/abs/2602.17616. The variance of a weighted mean is inverse to its effective sample size, and a learning
    rate goes with the square root of the batch. The bound of 1 is ours: above it the share is larger by chance.
    """
    return min(1.0, math.sqrt(ess / on_policy_ess))
