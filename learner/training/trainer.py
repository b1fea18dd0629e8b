"""The trainer: groups in, optimizer steps on the policy, weights and checkpoints out.

groups -> shaped rewards -> rows -> micro-batches -> frozen log-probs -> advantages     (once, before the first step)
       -> policy log-probs -> token losses -> correction -> aggregate -> backward       (each step, each micro-batch)
"""

import contextlib
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoTokenizer

from offbeat.common.config import Config, LoraSection
from offbeat.common.routing import Routing, record_routing
from offbeat.common.weights import WeightBuffer, make_layout, tensor_dtype
from offbeat.learner.diagnostics.calibration import load_calibration
from offbeat.learner.diagnostics.gradient_direction import GradientDirection
from offbeat.learner.diagnostics.group_metrics import Metrics, group_metrics
from offbeat.learner.diagnostics.loss_metrics import Noise, loss_metrics, row_statistics
from offbeat.learner.diagnostics.noise_floor import Differences
from offbeat.learner.leases.groups import Group
from offbeat.learner.objectives import objective
from offbeat.learner.objectives.aggregation import aggregate, denominator
from offbeat.learner.objectives.corrections import m2po_candidates, m2po_cutoff
from offbeat.learner.objectives.kl import adapt_kl_coefficient, kl_estimate, unbiased_kl
from offbeat.learner.objectives.losses import value_loss
from offbeat.learner.objectives.objective import PolicyLogprobs
from offbeat.learner.objectives.reward_shaping import RunningMoments, load_length_penalty, shape_rewards
from offbeat.learner.policy.loading import check_policy, load_policy, load_reference
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.lora import base_shapes, merged_parameters, without_adapter
from offbeat.learner.policy.packing import pack, unpack
from offbeat.learner.policy.process_group import gather_rows, gather_tensors, join_process_group
from offbeat.learner.policy.zero import (
    deepspeed_config,
    discard_gradients,
    full_gradients,
    full_shape,
    make_engine,
    muted_prints,
)
from offbeat.learner.training import checkpoints
from offbeat.learner.training.batching import MicroBatch, Row, assign_rows, collate, make_rows
from offbeat.learner.training.learning_rate import learning_rate
from offbeat.learner.training.preparation import Frozen, Prepared, completion_advantages, prepare, scale_advantages, token_kl
from offbeat.protocols.messages import TensorSpec

_STATE_TAG = "state"
"""DeepSpeed's files in a checkpoint folder."""
_META_FILE = "trainer.json"
_ADAPTED_FILE = "adapted.json"


class CheckpointMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint must agree on with the trainer that loads it."""

    policy_version: int
    world_size: int
    zero_stage: int
    dtype: str
    lora: LoraSection
    has_critic: bool


class Adapted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run learns beside the weights; part of its checkpoints."""

    kl_coefficient: float
    """Of the KL in the loss or in the reward."""
    rewards: RunningMoments = RunningMoments()
    """Of all rewards so far, where `reward.norm_mean` or `reward.norm_std` is "running"."""


class Scored(NamedTuple):
    """What the policy makes of given tokens."""

    logprobs: NDArray[np.float32]
    """`[num_tokens - 1]`, of tokens 1.. given those before them, at temperature 1."""
    routing: Routing | None
    """Of tokens 0.. but the last; None for a dense model."""


class Sums(NamedTuple):
    """Sums over the tokens of a micro-batch or step of what a run may have besides the objective; 0 where it has not."""

    reference_kl: Tensor
    """Of the policy from the reference."""
    reward_kl: Tensor
    """Of the behavior policy from the reference, as taken from the rewards."""
    entropy: Tensor
    value_loss: Tensor


class StepTotals(NamedTuple):
    """The size of an optimizer step, over all micro-batches and ranks."""

    num_rows: int
    num_tokens: int
    denominator: float
    """What sums of `aggregate` are divided by."""


class Trainer:
    """The policy under DeepSpeed, on this rank. Unless said otherwise every rank calls every method, in the same order."""

    def __init__(self, config: Config) -> None:
        """Raises ValueError for a model that cannot be trained; `config` is complete (`common.objectives.complete`)."""
        self._config = config
        self._loss = config.loss
        self._train = config.train
        self._model = config.model
        self._temperature = config.rollout.temperature
        self.rank, self.world_size, self.device = join_process_group()
        self.policy_version = 0
        """Optimizer steps taken, those before a loaded checkpoint included."""
        torch.manual_seed(config.run.seed)
        self._module = load_policy(config)
        self._policy = self._module.policy
        deepspeed = deepspeed_config(config.train, config.model.dtype)
        self._zero_stage = deepspeed["zero_optimization"]["stage"]
        self._engine = make_engine(self._module, deepspeed, config.train)
        check_policy(self._module, config.model, self.device)
        kl = config.kl
        self._reference: CompletionLogprobs | None = None
        # Under an adapter the initial policy is there already: the policy without it.
        if (kl.loss_coef or kl.reward_coef) and (kl.reference or not config.lora.rank):
            self._reference = load_reference(config, self.device)
        path = config.reward.length_penalty
        self._length_penalty = load_length_penalty(path) if path else None
        self._adapted = Adapted(kl_coefficient=kl.loss_coef or kl.reward_coef)
        self._direction = GradientDirection()
        path = config.loss.noise_floor
        self._noise_floor = load_calibration(path).floor if path else None

    def train_batch(self, groups: Sequence[Group]) -> list[Metrics]:
        """Take `train.steps_per_batch` optimizer steps, each on the next `train.groups_per_step` of `groups`.

        That is one epoch; the same steps are taken `train.epochs_per_batch` times, against the same frozen log-probs and with
        the same advantages. Every rank passes the same groups and takes its own share of their rows. Returns the metrics of
        each step, the same on every rank; times are this rank's.
        """
        per_step, num_steps = self._train.groups_per_step, self._train.steps_per_batch
        if len(groups) != per_step * num_steps:
            raise ValueError(
                f"train_batch got {len(groups)} groups; train.groups_per_step * train.steps_per_batch = {per_step * num_steps}"
            )
        steps = [groups[start : start + per_step] for start in range(0, len(groups), per_step)]
        rows = [self._rows(of_step, self.policy_version + index) for index, of_step in enumerate(steps)]
        start = time.perf_counter()
        # Before the first step: the proximal policy is the one that the whole batch starts from.
        prepared = [self._prepare(of_step) for of_step in rows]
        prepare_s = time.perf_counter() - start
        metrics: list[Metrics] = []
        for epoch in range(self._train.epochs_per_batch):
            for of_step in zip(steps, rows, prepared, strict=True):
                metrics.append(self._step(*of_step, num_steps_before=epoch * num_steps))
        for index, of_step in enumerate(metrics):
            of_step["time/prepare_s"] = prepare_s if index == 0 else 0.0
        return metrics

    def tune(self, *, clip_low: float | None, clip_high: float | None, learning_rate: float) -> None:
        """Train with these settings from the next batch on; None for an objective that does not clip."""
        self._loss = msgspec.structs.replace(self._loss, clip_low=clip_low, clip_high=clip_high)
        self._train = msgspec.structs.replace(self._train, learning_rate=learning_rate)

    def gradient(self, groups: Sequence[Group]) -> tuple[Metrics, Tensor]:
        """What a step on these `train.groups_per_step` groups would see, but not taken: its metrics, and its gradient.

        The gradient is before clipping, one float32 vector in the CPU's memory; what it holds says `full_gradients`. Weights,
        optimizer and whatever else a step changes stay as they are.
        """
        if len(groups) != self._train.groups_per_step:
            raise ValueError(f"gradient got {len(groups)} groups; train.groups_per_step = {self._train.groups_per_step}")
        adapted = self._adapted
        rows = self._rows(groups, self.policy_version)
        metrics = self._see_batch(groups, rows, self._prepare(rows))
        parameters = dict(self._module.named_parameters())
        gradients = [
            torch.zeros(full_shape(parameters[name])) if gradient is None else gradient.to("cpu", torch.float32, copy=True)
            for name, gradient in full_gradients(parameters.items(), zero_stage=self._zero_stage)
        ]
        discard_gradients(self._engine)
        self._adapted = adapted
        return metrics, torch.cat([gradient.flatten() for gradient in gradients])

    def layout(self) -> tuple[TensorSpec, ...]:
        """The weights that `snapshot` copies: Hugging Face names in the model's order, tied weights once. Any rank may ask."""
        return make_layout(base_shapes(self._policy), tensor_dtype(self._model.dtype))

    def snapshot(self, buffer: WeightBuffer | None) -> None:
        """Copy the current weights into rank 0's buffer; the other ranks pass None."""
        views = dict(buffer.views()) if buffer is not None else {}
        for name, weight in merged_parameters(self._policy):
            if buffer is not None:
                views[name].copy_(weight)

    def score(self, token_ids: Sequence[int]) -> Scored:
        """What the policy makes of given tokens, of which there are at least two."""
        packed = pack([(token_ids[:1], [token_ids[1:]])]).to(self.device)
        with torch.no_grad(), record_routing(self._policy) as record:
            logprobs, _, _ = self._module(*packed.inputs, 1.0)
        return Scored(logprobs.cpu().numpy(), record.routing())

    @torch.no_grad()
    def compare(self, groups: Sequence[Group]) -> Differences:
        """What the policy makes of what engines have sampled, computed as in training; completions in any order.

        The same on every rank.
        """
        tokens: list[Tensor] = []
        lengths: list[Tensor] = []
        for micro_batch, _, advantages, _ in self._prepare(self._rows(groups, self.policy_version)):
            logprobs, _, _ = self._outputs(self._module, micro_batch)
            log_ratios = logprobs.double() - micro_batch.behavior_logprobs.double()
            tokens.append(torch.stack([log_ratios, advantages.double()], dim=-1)[micro_batch.completion_mask])
            lengths.append(micro_batch.completion_mask.sum(dim=-1))
        log_ratios, advantages = gather_rows(torch.cat(tokens)).unbind(dim=-1)
        return Differences(gather_rows(torch.cat(lengths)).numpy(), log_ratios.numpy(), advantages.numpy())

    def save_checkpoint(self, folder: Path, extra: bytes) -> None:
        """Write all that continues this run: weights, optimizer, random state, and the caller's own `extra` (rank 0's).

        `folder` appears at the end and whole: see `learner.training.checkpoints`. Raises its `NoRoomError` on a full disk.
        """
        partial = checkpoints.partial_folder(folder)
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        # DeepSpeed makes the folder and has the other ranks wait for that.
        with muted_prints():
            self._engine.save_checkpoint(str(partial), tag=_STATE_TAG, save_latest=False)
        torch.save(_random_state(), partial / _random_file(self.rank))
        dist.barrier()
        if self.rank == 0:
            checkpoints.write_extra(partial, extra)
            (partial / _META_FILE).write_bytes(msgspec.json.encode(self._meta()))
            (partial / _ADAPTED_FILE).write_bytes(msgspec.json.encode(self._adapted))
            checkpoints.publish(folder)
        dist.barrier()

    def load_checkpoint(self, folder: Path) -> bytes:
        """Continue where `folder` was saved; returns the `extra` saved with it."""
        meta = msgspec.json.decode((folder / _META_FILE).read_bytes(), type=CheckpointMeta)
        expected = msgspec.structs.replace(self._meta(), policy_version=meta.policy_version)
        if meta != expected:
            raise ValueError(
                f"checkpoint {folder} was saved with {meta}, this run has {expected}: resume with the same number of "
                "learner processes (launch.learner_processes), train.zero_stage, model.dtype, lora and critic"
            )
        with muted_prints():
            loaded, _ = self._engine.load_checkpoint(str(folder), tag=_STATE_TAG)
        if loaded is None:
            raise FileNotFoundError(f"checkpoint {folder} holds no DeepSpeed state")
        _set_random_state(torch.load(folder / _random_file(self.rank), weights_only=True))
        adapted = msgspec.json.decode((folder / _ADAPTED_FILE).read_bytes(), type=Adapted)
        # A coefficient that does not adapt is a setting, which may have been changed since.
        adapts = self._config.kl.target is not None
        kl_coefficient = adapted.kl_coefficient if adapts else self._adapted.kl_coefficient
        self._adapted = msgspec.structs.replace(adapted, kl_coefficient=kl_coefficient)
        self.policy_version = meta.policy_version
        return checkpoints.read_extra(folder)

    def save_model(self, folder: Path) -> None:
        """Write weights, config and tokenizer as transformers reads them; rank 0 holds the whole model for it."""
        state: dict[str, Tensor] = {}
        for name, weight in merged_parameters(self._policy):
            if self.rank == 0:
                # Copied one by one: ZeRO's parameters are views into one storage, which would be saved whole for each.
                state[name] = weight.to("cpu", copy=True)
        if self.rank == 0:
            persistent = self._policy.state_dict().keys()
            state |= {name: buffer.cpu() for name, buffer in self._policy.named_buffers() if name in persistent}
            self._policy.save_pretrained(folder, state_dict=state)
            AutoTokenizer.from_pretrained(self._model.path).save_pretrained(folder)
        dist.barrier()

    def close(self) -> None:
        """Free the engine. The process group stays: it lives as long as the process."""
        self._engine.destroy()

    # Before the first step

    def _rows(self, groups: Sequence[Group], policy_version: int) -> list[Row]:
        reward = self._config.reward
        assert reward.overlong_buffer is not None, "the config is not complete (common.objectives)"
        shaped = shape_rewards(
            np.array([[rollout.reward for rollout in group.rollouts] for group in groups]),
            np.array([[len(rollout.token_ids) for rollout in group.rollouts] for group in groups]),
            max_new_tokens=self._config.rollout.max_new_tokens,
            overlong_buffer=reward.overlong_buffer,
            overlong_penalty=reward.overlong_penalty,
            length_penalty=self._length_penalty,
            norm_mean=reward.norm_mean,
            norm_std=reward.norm_std,
            clip=reward.clip,
            running=self._adapted.rewards,
        )
        self._adapted = msgspec.structs.replace(self._adapted, rewards=shaped.running)
        advantages = completion_advantages(shaped.rewards, self._config.advantage)
        return make_rows(groups, shaped.rewards, advantages, policy_version=policy_version)

    def _prepare(self, rows: Sequence[Row]) -> list[Prepared]:
        """This rank's micro-batches of one optimizer step."""
        assigned = assign_rows(rows, micro_batch_tokens=self._train.micro_batch_tokens, world_size=self.world_size)
        micro_batches = [collate(of_micro_batch).to(self.device) for of_micro_batch in assigned[self.rank]]
        advantage, kl = self._config.advantage, self._config.kl
        kl_coefficient = self._adapted.kl_coefficient if kl.reward_coef else 0.0
        prepared = [
            prepare(micro_batch, self._frozen(micro_batch), advantage=advantage, kl=kl, kl_coefficient=kl_coefficient)
            for micro_batch in micro_batches
        ]
        return scale_advantages(prepared, advantage)

    @torch.no_grad()
    def _frozen(self, micro_batch: MicroBatch) -> Frozen:
        frozen = Frozen()
        if self._loss.anchor != "behavior" or self._module.value_head is not None:
            logprobs, _, values = self._outputs(self._module, micro_batch)
            frozen = frozen._replace(proximal_logprobs=logprobs if self._loss.anchor != "behavior" else None, values=values)
        if self._config.kl.loss_coef or self._config.kl.reward_coef:
            without = contextlib.nullcontext() if self._reference is not None else without_adapter(self._policy)
            with without:
                logprobs, _, _ = self._outputs(self._reference or self._module, micro_batch)
            frozen = frozen._replace(reference_logprobs=logprobs)
        return frozen

    def _outputs(self, module: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs, entropies and values `[rows, tokens]`; the last two None unless the run asks for them."""
        packed = micro_batch.pack
        logprobs, entropies, values = module(*packed.inputs, self._temperature)
        return (
            unpack(logprobs, packed.lengths),
            None if entropies is None else unpack(entropies, packed.lengths),
            None if values is None else unpack(values, packed.lengths),
        )

    # A step

    def _step(
        self, groups: Sequence[Group], rows: Sequence[Row], batch: Sequence[Prepared], *, num_steps_before: int
    ) -> Metrics:
        """One optimizer step; its rows have made so many in earlier epochs, and are by that much staler."""
        start = time.perf_counter()
        metrics = self._see_batch(groups, rows, [_aged(prepared, num_steps_before) for prepared in batch])
        rate = self._learning_rate()
        cosine = self._direction.compare(full_gradients(self._module.named_parameters(), zero_stage=self._zero_stage))
        if cosine is not None:
            metrics["loss/grad_cosine"] = cosine
        grad_norm = self._apply_gradients(rate)
        # DeepSpeed skips the step and tells -1 under some stages.
        if not 0 <= grad_norm < math.inf:
            raise FloatingPointError(
                f"the gradient norm of optimizer step {self.policy_version} is {grad_norm} (loss {metrics['loss/policy']}, "
                f"largest token log ratio {metrics['ratio/token_log_abs_max']}): the weights cannot be trusted any more"
            )
        self.policy_version += 1
        metrics |= {
            "loss/grad_norm": grad_norm,
            "loss/learning_rate": rate,
            "time/train_s": time.perf_counter() - start,
        }
        return metrics

    def _see_batch(self, groups: Sequence[Group], rows: Sequence[Row], batch: Sequence[Prepared]) -> Metrics:
        """Everything of a step but the step: gradients, accumulated, and the metrics."""
        num_tokens = sum(len(row.rollout.token_ids) for row in rows)
        assert self._loss.aggregation is not None, "the config is not complete (common.objectives)"
        totals = StepTotals(
            len(rows),
            num_tokens,
            denominator(
                self._loss.aggregation,
                num_rows=len(rows),
                num_tokens=num_tokens,
                length=self._loss.aggregation_length or 1,
            ),
        )
        table, sums = self._accumulate_gradients(batch, totals)
        metrics: Metrics = {**group_metrics(groups, self.policy_version)}
        metrics |= loss_metrics(
            gather_rows(table),
            aggregation=self._loss.aggregation,
            denominator=totals.denominator,
            noise=None if self._noise_floor is None else Noise(self._noise_floor, objective.engine_band(self._loss)),
        )
        if self.policy_version > 0:
            del metrics["ratio/first"]
        return metrics | self._sum_metrics(sums, totals)

    def _accumulate_gradients(self, batch: Sequence[Prepared], totals: StepTotals) -> tuple[Tensor, Tensor]:
        """Gradient of the step's loss on all ranks; returns this rank's table (`row_statistics`) and `Sums`."""
        cutoff = self._m2po_cutoff(batch)
        tables: list[Tensor] = []
        sums = torch.zeros(len(Sums._fields), dtype=torch.float64, device=self.device)
        for index, prepared in enumerate(batch):
            self._engine.set_gradient_accumulation_boundary(index == len(batch) - 1)
            loss_sum, table, of_micro_batch = self._loss_sum(prepared, cutoff)
            # DeepSpeed averages gradients over ranks; the loss is a sum over all of them.
            self._engine.backward(loss_sum * (self.world_size / totals.denominator))
            tables.append(table)
            sums += torch.stack([value.detach().double() for value in of_micro_batch])
        return torch.cat(tables), gather_tensors(sums).sum(dim=0)

    def _loss_sum(self, prepared: Prepared, cutoff: float) -> tuple[Tensor, Tensor, "Sums"]:
        """One micro-batch through the policy: its loss, to be divided by `StepTotals.denominator`, and its statistics."""
        micro_batch, frozen, advantages = prepared.micro_batch, prepared.frozen, prepared.advantages
        mask, loss, kl, mode = micro_batch.completion_mask, self._loss, self._config.kl, self._loss.aggregation
        assert mode is not None
        policy_logprobs, entropies, values = self._outputs(self._engine, micro_batch)
        logprobs = PolicyLogprobs(policy_logprobs, micro_batch.behavior_logprobs, frozen.proximal_logprobs)
        losses, clipped = objective.token_losses(loss, logprobs, mask, advantages)
        correction = objective.correction(loss, logprobs, mask, advantages, m2po_cutoff=cutoff)
        if correction is not None:
            losses = losses * correction.weights
        sums = Sums(*[losses.new_zeros(())] * len(Sums._fields))
        total = losses
        if frozen.reference_logprobs is not None:
            divergence = kl_estimate(policy_logprobs, frozen.reference_logprobs, mask, estimator=kl.estimator)
            sums = sums._replace(reference_kl=divergence.sum())
            if kl.reward_coef:
                sums = sums._replace(reward_kl=token_kl(micro_batch, frozen, kl).sum())
            if kl.unbiased:
                divergence = unbiased_kl(
                    policy_logprobs, frozen.reference_logprobs, logprobs.behavior, mask, estimator=kl.estimator
                )
            if kl.loss_coef:
                total = total + self._adapted.kl_coefficient * divergence
        if entropies is not None:
            total = total - loss.entropy_coef * entropies
            sums = sums._replace(entropy=entropies.sum())
        if values is not None:
            assert frozen.values is not None and prepared.returns is not None
            critic = self._config.critic
            error = value_loss(values, frozen.values, prepared.returns, mask, value_clip=critic.value_clip)
            total = total + critic.loss_coef * error
            sums = sums._replace(value_loss=error.sum())
        table = row_statistics(
            policy_logprobs=policy_logprobs,
            anchor_logprobs=logprobs.anchor,
            behavior_logprobs=logprobs.behavior,
            proximal_logprobs=frozen.proximal_logprobs,
            completion_mask=mask,
            advantages=advantages,
            token_losses=losses,
            clipped=clipped,
            row_weights=micro_batch.weights,
            policy_lags=micro_batch.policy_lags,
            band=objective.band(loss, logprobs, mask),
            correction=correction,
        )
        return aggregate(total, mask, micro_batch.weights, mode=mode), table, sums

    def _m2po_cutoff(self, batch: Sequence[Prepared]) -> float:
        """Over the tokens of all ranks; inf when the run has no such correction."""
        if self._loss.correction != "m2po":
            return math.inf
        candidates: list[Tensor] = []
        for micro_batch, frozen, advantages, _ in batch:
            assert frozen.proximal_logprobs is not None
            log_rho = frozen.proximal_logprobs - micro_batch.behavior_logprobs
            candidates.append(m2po_candidates(log_rho, micro_batch.completion_mask, advantages))
        assert self._loss.correction_high is not None
        return m2po_cutoff(gather_rows(torch.cat(candidates)), threshold=self._loss.correction_high)

    def _sum_metrics(self, sums: Tensor, totals: StepTotals) -> dict[str, float]:
        """Means per token of what the run has besides the objective; adapts the KL's coefficient."""
        kl = self._config.kl
        means = Sums(*(sums / max(1, totals.num_tokens)).tolist())
        metrics: dict[str, float] = {}
        if kl.loss_coef or kl.reward_coef:
            metrics |= {"kl/reference": float(means.reference_kl), "kl/coefficient": self._adapted.kl_coefficient}
        if kl.reward_coef:
            metrics["kl/reward"] = float(means.reward_kl)
        if self._loss.entropy_coef:
            metrics["entropy/mean"] = float(means.entropy)
        if self._module.value_head is not None:
            metrics["loss/value"] = float(means.value_loss)
        if kl.target is not None:
            coefficient = adapt_kl_coefficient(
                self._adapted.kl_coefficient,
                float(means.reward_kl if kl.reward_coef else means.reference_kl),
                target=kl.target,
                num_steps=totals.num_rows,
                horizon=kl.horizon,
            )
            self._adapted = msgspec.structs.replace(self._adapted, kl_coefficient=coefficient)
        return metrics

    def _apply_gradients(self, rate: float) -> float:
        """Clip, take the optimizer step at this learning rate, return the gradient norm before clipping."""
        for param_group in self._engine.optimizer.param_groups:
            param_group["lr"] = rate
        norm = None
        if self._zero_stage == 0:
            # Without ZeRO DeepSpeed clips by the norm, but does not tell it.
            gradients = [parameter.grad for parameter in self._module.parameters() if parameter.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
        self._engine.step()
        return float(norm if norm is not None else self._engine.get_global_grad_norm())

    def _learning_rate(self) -> float:
        return learning_rate(
            self.policy_version,
            peak=self._train.learning_rate,
            schedule=self._train.lr_schedule,
            warmup_steps=self._train.warmup_steps,
            num_steps=self._train.num_steps,
        )

    def _meta(self) -> CheckpointMeta:
        return CheckpointMeta(
            self.policy_version,
            self.world_size,
            self._zero_stage,
            self._model.dtype,
            self._config.lora,
            self._module.value_head is not None,
        )


def _aged(prepared: Prepared, num_steps: int) -> Prepared:
    """The same micro-batch, so many optimizer steps later."""
    micro_batch = prepared.micro_batch
    return prepared._replace(micro_batch=micro_batch._replace(policy_lags=micro_batch.policy_lags + num_steps))


def _random_file(rank: int) -> str:
    return f"random-{rank}.pt"


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
