"""The trainer: groups in, optimizer steps on the policy, weights and checkpoints out.

groups -> shaped rewards -> rows -> micro-batches -> frozen outputs -> advantages       (once, before the first step)
       -> policy log-probs -> token losses -> correction -> aggregate -> backward       (each step, each micro-batch)
"""

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat.common.models.folders import resolve_model
from offbeat.common.models.images import ImageReader
from offbeat.common.models.routing import Routing, record_routing
from offbeat.common.settings.config import Config
from offbeat.common.weights.flat import make_layout, tensor_dtype
from offbeat.learner.calibration.calibration import load_calibration
from offbeat.learner.calibration.noise_floor import Differences
from offbeat.learner.diagnostics.broken_rows import broken_metrics
from offbeat.learner.diagnostics.gradient_direction import GradientDirection
from offbeat.learner.diagnostics.group_metrics import Metrics, group_metrics
from offbeat.learner.diagnostics.loss_metrics import EngineNoise, loss_metrics
from offbeat.learner.diagnostics.turn_metrics import turn_metrics
from offbeat.learner.leases.groups import Group
from offbeat.learner.objectives.aggregation import aggregate
from offbeat.learner.objectives.correction_rules import weigh
from offbeat.learner.objectives.kl import adapt_kl_coefficient
from offbeat.learner.objectives.losses import m2po_candidates, m2po_cutoff
from offbeat.learner.objectives.objective import StepConstants, resolve_objective
from offbeat.learner.objectives.reward_shaping import RunningMoments, resolve_reward_shaping, shape_rewards
from offbeat.learner.policy.compiling import check_compiling, compile_layers, compiles_layers
from offbeat.learner.policy.flops import FlopCounter, peak_flops
from offbeat.learner.policy.images import ImagePacker
from offbeat.learner.policy.loading import check_policy, load_policy, load_reference
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.lora import base_shapes, without_adapter
from offbeat.learner.policy.packed_attention import use_newest_flash_attention
from offbeat.learner.policy.packing import pack
from offbeat.learner.policy.process_group import gather_rows, gather_tensors, join_process_group
from offbeat.learner.policy.routing_replay import make_replay
from offbeat.learner.policy.saving import gather_policy, write_policy
from offbeat.learner.policy.sequence_parallel import join_sequence_group
from offbeat.learner.policy.snapshots import write_snapshot
from offbeat.learner.policy.zero import deepspeed_config, discard_gradients, full_gradients, full_shape, make_engine
from offbeat.learner.training.batching import MicroBatch, TrainingRow, assign_rows, collate, make_rows
from offbeat.learner.training.checkpoints import put_in_place
from offbeat.learner.training.micro_batch_loss import TermSums, compute_loss
from offbeat.learner.training.preparation import (
    FrozenOutputs,
    Outputs,
    PreparedMicroBatch,
    add_lag,
    ess_scale,
    learning_rate,
    prepare_micro_batch,
    require_same_settings,
    resolve_advantage,
    row_advantages,
    run_network,
    scale_advantages,
)
from offbeat.learner.training.tensor_files import disk_errors
from offbeat.learner.training.trainer_state import AdaptiveState, CheckpointMeta, load_state, save_state, write_folder
from offbeat.protocols.messages import TensorSpec


class Scored(NamedTuple):
    """The policy's scores of given tokens."""

    logprobs: NDArray[np.float32]
    """Log-probs of tokens 1.. given those before them, at temperature 1, `[num_tokens - 1]`."""
    routing: Routing | None
    """Routing of all tokens but the last; None for a dense model."""


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
        objective, max_new_tokens = config.loss.objective, config.rollout.max_new_tokens
        self._config = config
        self._train = config.train
        self._objective = resolve_objective(config.loss, max_new_tokens=max_new_tokens)
        self._advantage = resolve_advantage(config.advantage, objective=objective)
        self._shaping = resolve_reward_shaping(config.reward, objective=objective, max_new_tokens=max_new_tokens)
        self.rank, self.world_size, self.device = join_process_group()
        require_same_settings(config)
        check_compiling(config, self.device)
        self.policy_version = 0
        """Optimizer steps taken, including those before a loaded checkpoint."""
        torch.manual_seed(config.run.seed)
        self._num_alike = config.train.sequence_parallel_size
        sequence_group = join_sequence_group(self._num_alike, world_size=self.world_size)
        has_images = bool(config.task.image_field)
        self._images = ImagePacker(ImageReader(resolve_model(config.model.path))) if has_images else None
        self._module = load_policy(config, sequence_group)
        self._flops = FlopCounter(self._module, checkpointing=bool(config.train.activation_checkpointing))
        self._peak_flops = peak_flops(self.device, tensor_dtype(config.model.dtype))
        deepspeed = deepspeed_config(config.train, config.model.dtype)
        self._zero_stage: int = deepspeed["zero_optimization"]["stage"]
        self._engine = make_engine(self._module, deepspeed, config.train)
        check_policy(self._module, config.model, self.device)
        use_newest_flash_attention(self._module.policy, self.device)
        if compiles_layers(config, self._module.policy.config, self.device):
            compile_layers(self._module.policy)
        self._replay = make_replay(self._module, config.loss.routing_replay)
        kl = config.kl
        self._reference: CompletionLogprobs | None = None
        # An adapted policy needs no second model: without its adapter it is the initial policy.
        if (kl.loss_coef or kl.reward_coef) and (kl.reference or not config.lora.rank):
            self._reference = load_reference(config, self.device, sequence_group)
        self._adaptive = AdaptiveState(kl_coefficient=kl.loss_coef or kl.reward_coef)
        self._direction = GradientDirection()
        path = config.loss.noise_floor
        self._noise = load_calibration(path).noise if path else None

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
            of_rows, running = self._make_rows(of_step, self.policy_version + index, self._adaptive.rewards)
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
        self._objective = resolve_objective(loss, max_new_tokens=self._config.rollout.max_new_tokens)
        self._train = msgspec.structs.replace(self._train, learning_rate=learning_rate)

    def gradient(self, groups: Sequence[Group]) -> tuple[Metrics, Tensor]:
        """Compute the metrics and the gradient of a step on `train.groups_per_step` groups without taking the step.

        The gradient is before clipping, one float32 vector in CPU memory, made of the parameters that `full_gradients` lists.
        Weights, optimizer and adaptive state stay as they are.
        """
        if len(groups) != self._train.groups_per_step:
            raise ValueError(f"gradient got {len(groups)} groups; train.groups_per_step = {self._train.groups_per_step}")
        rows, _ = self._make_rows(groups, self.policy_version, self._adaptive.rewards)
        metrics, _ = self._compute_gradient(TrainingStep(groups, rows, self._prepare(rows)))
        parameters = dict(self._module.named_parameters())
        gradients = [
            torch.zeros(full_shape(parameters[name])) if gradient is None else gradient.to("cpu", torch.float32, copy=True)
            for name, gradient in full_gradients(parameters.items(), zero_stage=self._zero_stage)
        ]
        discard_gradients(self._engine)
        return metrics, torch.cat([gradient.flatten() for gradient in gradients])

    def layout(self) -> tuple[TensorSpec, ...]:
        """List the weights that `snapshot` copies: Hugging Face names, the model's order, tied weights once; no collective."""
        return make_layout(base_shapes(self._module.policy), tensor_dtype(self._config.model.dtype))

    def snapshot(self, views: dict[str, Tensor] | None) -> None:
        """Copy the current weights into these views by name, as `write_snapshot` does."""
        write_snapshot(self._module.policy, views, self.device)

    def score(self, token_ids: Sequence[int]) -> Scored:
        """Score at least two given tokens."""
        packed = pack([(token_ids[:1], [token_ids[1:]])]).to(self.device)
        self._replay.tell(None)
        with torch.no_grad(), self._module.whole_packs(), record_routing(self._module.policy) as record:
            logprobs, _, _ = self._module(*packed.inputs, 1.0)
        return Scored(logprobs.cpu().numpy(), record.routing())

    @torch.no_grad()
    def compare(self, groups: Sequence[Group]) -> Differences:
        """Compare the policy's log-probs with those of the engines that sampled the groups, computed as in training.

        Completions are in any order, the same on every rank.
        """
        tokens: list[Tensor] = []
        completions: list[Tensor] = []
        rows, _ = self._make_rows(groups, self.policy_version, self._adaptive.rewards)
        for micro_batch, _, advantages, _ in self._prepare(rows):
            logprobs = self._run(self._module, micro_batch).logprobs
            log_ratios = logprobs.double() - micro_batch.behavior_logprobs.double()
            tokens.append(torch.stack([log_ratios, advantages.double()], dim=-1)[micro_batch.completion_mask])
            completions.append(torch.stack([micro_batch.completion_mask.sum(dim=-1), micro_batch.groups], dim=-1))
        log_ratios, advantages = gather_rows(torch.cat(tokens), num_alike=self._num_alike).unbind(dim=-1)
        lengths, numbers = gather_rows(torch.cat(completions), num_alike=self._num_alike).unbind(dim=-1)
        return Differences(lengths.numpy(), log_ratios.numpy(), advantages.numpy(), numbers.numpy())

    def save_checkpoint(self, folder: Path, extra: bytes) -> None:
        """Write everything that continues this run, and rank 0's `extra`. `CheckpointFailedError` leaves no rank behind."""
        save_state(folder, self._engine, self._describe_checkpoint(), self._adaptive, extra, rank=self.rank)

    def load_checkpoint(self, folder: Path) -> bytes:
        """Continue from the checkpoint in `folder`; return the `extra` saved with it."""
        loaded = load_state(folder, self._engine, self._describe_checkpoint(), rank=self.rank)
        # A coefficient that does not adapt is a setting, which may have changed since.
        adapts = self._config.kl.target is not None
        kl_coefficient = loaded.adaptive.kl_coefficient if adapts else self._adaptive.kl_coefficient
        self._adaptive = msgspec.structs.replace(loaded.adaptive, kl_coefficient=kl_coefficient)
        self.policy_version = loaded.policy_version
        return loaded.extra

    def save_model(self, folder: Path) -> None:
        """Write weights, config and tokenizer as transformers reads them; rank 0 holds the whole model meanwhile.

        `folder` appears whole, in place of an older one. Raises `CheckpointFailedError` on every rank where rank 0 cannot.
        """
        policy, is_first = self._module.policy, self.rank == 0
        state = gather_policy(policy, is_keeper=is_first)

        def write(partial: Path) -> None:
            if is_first:
                with disk_errors(partial):
                    write_policy(policy, state, partial, tokenizer=self._config.model.path)

        write_folder(folder, write, put_in_place, rank=self.rank)

    def close(self) -> None:
        """Free the engine. The process group lives as long as the process."""
        self._engine.destroy()

    # Before the first step

    def _make_rows(
        self, groups: Sequence[Group], policy_version: int, running: RunningMoments
    ) -> tuple[list[TrainingRow], RunningMoments]:
        """Return the completions of one optimizer step with shaped rewards, and the reward moments to continue with."""
        shaped = shape_rewards(
            np.array([[rollout.reward for rollout in group.rollouts] for group in groups]),
            np.array([[rollout.longest_turn for rollout in group.rollouts] for group in groups]),
            self._shaping,
            running=running,
        )
        advantages = row_advantages(groups, shaped.rewards, self._advantage)
        is_prompt_mean = self._objective.aggregation == "prompt-mean-token-mean"
        rows = make_rows(groups, shaped.rewards, advantages, policy_version=policy_version, weigh_by_tokens=is_prompt_mean)
        return rows, shaped.running

    def _prepare(self, rows: Sequence[TrainingRow]) -> list[PreparedMicroBatch]:
        """Return this rank's micro-batches of one optimizer step."""
        share, num_shares = self.rank // self._num_alike, self.world_size // self._num_alike
        assigned = assign_rows(rows, micro_batch_tokens=self._train.micro_batch_tokens, world_size=num_shares)
        kl = self._config.kl
        kl_coefficient = self._adaptive.kl_coefficient if kl.reward_coef else 0.0
        prepared: list[PreparedMicroBatch] = []
        for micro_batch in [collate(of_micro_batch, self._images).to(self.device) for of_micro_batch in assigned[share]]:
            frozen = self._run_frozen(micro_batch)
            prepared.append(
                prepare_micro_batch(micro_batch, frozen, self._advantage, estimator=kl.estimator, kl_coefficient=kl_coefficient)
            )
        return scale_advantages(prepared, self._advantage, num_alike=self._num_alike)

    @torch.no_grad()
    def _run_frozen(self, micro_batch: MicroBatch) -> FrozenOutputs:
        """Run the networks that stay fixed during the update, as far as the run needs them."""
        frozen = FrozenOutputs()
        needs_proximal = self._objective.needs_proximal
        if needs_proximal or self._module.value_head is not None:
            with self._replay.note() as noted:
                outputs = self._run(self._module, micro_batch)
            frozen = FrozenOutputs(outputs.logprobs if needs_proximal else None, values=outputs.values, experts=noted())
        if self._config.kl.loss_coef or self._config.kl.reward_coef:
            has_model = self._reference is not None
            with contextlib.nullcontext() if has_model else without_adapter(self._module.policy):
                outputs = self._run(self._reference or self._module, micro_batch)
            frozen = frozen._replace(reference_logprobs=outputs.logprobs)
        return frozen

    def _run(self, network: nn.Module, micro_batch: MicroBatch) -> Outputs:
        self._replay.tell(micro_batch.pack.experts)
        return run_network(network, micro_batch, temperature=self._config.rollout.temperature)

    # A step

    def _take_step(self, step: TrainingStep, *, num_steps_before: int) -> Metrics:
        """Take one optimizer step; `num_steps_before` steps of earlier epochs make its completions staler by as many."""
        start = time.perf_counter()
        aged = step._replace(micro_batches=[add_lag(prepared, num_steps_before) for prepared in step.micro_batches])
        metrics, means = self._compute_gradient(aged)
        self._adapt_kl_coefficient(means, num_rows=len(step.rows))
        rate = self._compute_learning_rate(metrics)
        cosine = self._direction.compare(full_gradients(self._module.named_parameters(), zero_stage=self._zero_stage))
        if cosine is not None:
            metrics["loss/grad_cosine"] = cosine
        grad_norm = self._apply_gradients(rate)
        # Under some ZeRO stages DeepSpeed skips the step and reports a norm of -1.
        if not 0 <= grad_norm < math.inf:
            broken = metrics.get("broken/leases")
            raise FloatingPointError(
                f"the gradient norm of optimizer step {self.policy_version} is {grad_norm} (loss {metrics['loss/policy']}, "
                f"largest token log ratio {metrics['ratio/token_log_abs_max']}; leases with broken log-probs: "
                f"{', '.join(broken) if isinstance(broken, dict) else 'none'}): the weights cannot be trusted any more"
            )
        self.policy_version += 1
        train_s = time.perf_counter() - start
        metrics |= {"loss/grad_norm": grad_norm, "loss/learning_rate": rate, "time/train_s": train_s}
        return metrics | self._compute_utilization(step.micro_batches, train_s)

    def _compute_gradient(self, step: TrainingStep) -> tuple[Metrics, TermSums]:
        """Accumulate the gradient of a step's loss; return the step's metrics and the mean of each `TermSums` per token."""
        num_tokens = step.num_tokens
        denominator = self._objective.denominator(num_groups=len(step.groups), num_rows=len(step.rows), num_tokens=num_tokens)
        table, sums = self._accumulate_gradients(step.micro_batches, denominator)
        means = TermSums(*(sums / max(1, num_tokens)))
        table = gather_rows(table, num_alike=self._num_alike)
        metrics: Metrics = {**group_metrics(step.groups, self.policy_version)}
        metrics |= turn_metrics(step.groups, self.policy_version, table)
        metrics |= broken_metrics(table, [group.lease_id for group in step.groups])
        metrics |= loss_metrics(
            table,
            aggregation=self._objective.aggregation,
            denominator=denominator,
            noise=None if self._noise is None else EngineNoise(self._noise, self._objective.engine_band),
        )
        if self.policy_version > 0:
            del metrics["ratio/first"]
        return metrics | self._term_metrics(means) | self._replay.take_metrics(num_alike=self._num_alike), means

    def _compute_utilization(self, micro_batches: Sequence[PreparedMicroBatch], train_s: float) -> Metrics:
        """Return the operations of a step that took `train_s`, of all ranks, and their share of what the devices can do."""
        packs = [prepared.micro_batch.pack for prepared in micro_batches]
        model, recomputed = (sum(counts) for counts in zip(*map(self._flops.count_training, packs), strict=True))
        if self._objective.m2_threshold is not None:
            recomputed += sum(map(self._flops.count_forward, packs))
        counts = torch.tensor([model, recomputed], dtype=torch.float64)
        model, recomputed = gather_tensors(counts, num_alike=self._num_alike).sum(dim=0).tolist()
        return {
            "compute/flops": model,
            "compute/recomputed": recomputed / model,
            "compute/peak": self._peak_flops * self.world_size,
            "compute/mfu": model / (self._peak_flops * self.world_size * train_s),
        }

    def _accumulate_gradients(self, micro_batches: Sequence[PreparedMicroBatch], denominator: float) -> tuple[Tensor, Tensor]:
        """Accumulate gradients over all ranks; return this rank's table (`row_statistics`) and all ranks' `TermSums`."""
        constants = StepConstants(self._find_m2po_cutoff(micro_batches), self._find_mean_weight(micro_batches))
        tables: list[Tensor] = []
        sums = torch.zeros(len(TermSums._fields), dtype=torch.float64, device=self.device)
        for index, prepared in enumerate(micro_batches):
            self._engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            loss = compute_loss(
                prepared,
                self._run(self._engine, prepared.micro_batch),
                self._objective,
                kl=self._config.kl,
                kl_coefficient=self._adaptive.kl_coefficient,
                critic=self._config.critic,
                constants=constants,
            )
            # DeepSpeed averages gradients over ranks; the loss is a sum over all of them. Of ranks that share a pack each has
            # the gradient through its own tokens.
            self._engine.backward(loss.total * (self.world_size / denominator))
            tables.append(loss.table)
            sums += torch.stack([value.double() for value in loss.sums])
        return torch.cat(tables), gather_tensors(sums, num_alike=self._num_alike).sum(dim=0)

    @torch.no_grad()
    def _find_m2po_cutoff(self, batch: Sequence[PreparedMicroBatch]) -> float:
        """Return the cutoff of M2PO over the tokens of all ranks; inf for other objectives.

        Runs the current policy once more: the cutoff must be known before the first gradient.
        """
        threshold = self._objective.m2_threshold
        if threshold is None:
            return math.inf
        candidates: list[Tensor] = []
        for micro_batch, _, advantages, _ in batch:
            log_ratio = self._run(self._module, micro_batch).logprobs - micro_batch.behavior_logprobs
            candidates.append(m2po_candidates(log_ratio, micro_batch.completion_mask, advantages))
        return m2po_cutoff(gather_rows(torch.cat(candidates), num_alike=self._num_alike), threshold=threshold)

    def _find_mean_weight(self, batch: Sequence[PreparedMicroBatch]) -> float:
        """Return the mean of the corrections' weights over the loss of all ranks; 1 without `loss.normalize_correction`.

        The mean is the loss's own: over tokens under `token-mean`, over completions where these weigh alike.
        """
        objective = self._objective
        if not objective.normalize_correction:
            return 1.0
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for micro_batch, frozen, _, _ in batch:
            assert frozen.proximal_logprobs is not None, "only a decoupled anchor normalizes its weights"
            mask, row_weights = micro_batch.completion_mask, micro_batch.weights
            log_rho = frozen.proximal_logprobs - micro_batch.behavior_logprobs
            # Rows that are not finite have no loss (`broken_rows`).
            mask = mask & (log_rho.isfinite() | ~mask).all(dim=-1, keepdim=True)
            weights = weigh(objective.corrections, log_rho, mask)
            of_both = [aggregate(values, mask, row_weights, mode=objective.aggregation) for values in (weights, mask.float())]
            sums += torch.stack(of_both).double()
        weighed, unweighed = gather_tensors(sums, num_alike=self._num_alike).sum(dim=0).tolist()
        # Weights that are all 0, or a step without loss tokens, have no mean to divide by.
        return weighed / unweighed if weighed > 0 else 1.0

    def _term_metrics(self, means: TermSums) -> dict[str, float]:
        """Name the means of the loss terms that the run has."""
        kl = self._config.kl
        metrics: dict[str, float] = {"entropy/mean": means.entropy.item()}
        if kl.loss_coef or kl.reward_coef:
            metrics |= {"kl/reference": means.reference_kl.item(), "kl/coefficient": self._adaptive.kl_coefficient}
        if kl.reward_coef:
            metrics["kl/reward"] = means.reward_kl.item()
        if self._module.value_head is not None:
            metrics["loss/value"] = means.value_loss.item()
        return metrics

    def _adapt_kl_coefficient(self, means: TermSums, *, num_rows: int) -> None:
        """Move the KL's coefficient after a step of `num_rows` completions, if `kl.target` is set."""
        kl = self._config.kl
        if kl.target is None:
            return
        measured = means.reward_kl if kl.reward_coef else means.reference_kl
        coefficient = adapt_kl_coefficient(
            self._adaptive.kl_coefficient, measured.item(), target=kl.target, num_steps=num_rows, horizon=kl.horizon
        )
        self._adaptive = msgspec.structs.replace(self._adaptive, kl_coefficient=coefficient)

    def _apply_gradients(self, rate: float) -> float:
        """Clip, take the optimizer step at this learning rate, return the gradient norm before clipping."""
        for param_group in self._engine.optimizer.param_groups:
            param_group["lr"] = rate
        norm = None
        if self._zero_stage == 0:
            norm = nn.utils.clip_grad_norm_(self._module.parameters(), self._train.max_grad_norm)
        self._engine.step()
        return float(norm if norm is not None else self._engine.get_global_grad_norm())

    def _compute_learning_rate(self, metrics: Metrics) -> float:
        """Return the learning rate of the step that has these metrics."""
        train = self._train
        scheduled = learning_rate(
            self.policy_version,
            peak=train.learning_rate,
            schedule=train.lr_schedule,
            warmup_steps=train.warmup_steps,
            num_steps=train.num_steps,
        )
        if train.on_policy_ess is None:
            return scheduled
        ess = metrics["ess/sequence_truncated"]
        assert isinstance(ess, float), "only counts by name are tables"
        return scheduled * ess_scale(ess, on_policy_ess=train.on_policy_ess)

    def _describe_checkpoint(self) -> CheckpointMeta:
        return CheckpointMeta(
            self.policy_version,
            self.world_size,
            self._zero_stage,
            self._config.model.dtype,
            self._config.lora,
            self._module.value_head is not None,
        )
