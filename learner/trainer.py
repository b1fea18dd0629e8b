"""The trainer: groups in, optimizer steps on the policy, weights and checkpoints out."""

import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from common.config import Config, ModelSection
from common.weights import WeightBuffer, make_layout, tensor_dtype
from learner import checkpoints
from learner.batching import MicroBatch, assign_rows, collate, training_rows
from learner.groups import Group
from learner.learning_rate import learning_rate
from learner.logprobs import CompletionLogprobs
from learner.losses import gspo_loss
from learner.process_group import gather_tensors, join_process_group
from learner.step_metrics import LossTally, Metrics, group_metrics, loss_metrics
from learner.zero import deepspeed_config, full_shape, gathered_parameters, make_engine, muted_prints
from protocols.messages import TensorSpec

_STATE_TAG = "state"
"""DeepSpeed's files in a checkpoint folder."""
_META_FILE = "trainer.json"


class CheckpointMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint must agree on with the trainer that loads it."""

    policy_version: int
    world_size: int
    zero_stage: int
    dtype: str


class Trainer:
    """The policy under DeepSpeed, on this rank. Unless said otherwise every rank calls every method, in the same order."""

    def __init__(self, config: Config) -> None:
        self._loss = config.loss
        self._train = config.train
        self._model = config.model
        self._temperature = config.rollout.temperature
        self.rank, self.world_size, self.device = join_process_group()
        self.policy_version = 0
        """Optimizer steps taken, those before a loaded checkpoint included."""
        torch.manual_seed(config.run.seed)
        self._policy = _load_policy(config.model, activation_checkpointing=config.train.activation_checkpointing)
        self._module = CompletionLogprobs(self._policy)
        deepspeed = deepspeed_config(config.train, config.model.dtype)
        self._zero_stage = deepspeed["zero_optimization"]["stage"]
        self._engine = make_engine(self._module, deepspeed, config.train)
        self._check_head()

    def train_batch(self, groups: Sequence[Group]) -> list[Metrics]:
        """Take `train.steps_per_batch` optimizer steps, each on the next `train.groups_per_step` of `groups`.

        Every rank passes the same groups and takes its own share of their rows. Returns the metrics of each step, the
        same on every rank; times are this rank's.
        """
        per_step, num_steps = self._train.groups_per_step, self._train.steps_per_batch
        if len(groups) != per_step * num_steps:
            raise ValueError(
                f"train_batch got {len(groups)} groups; train.groups_per_step * train.steps_per_batch = {per_step * num_steps}"
            )
        steps = [groups[start : start + per_step] for start in range(0, len(groups), per_step)]
        micro_batches = [self._micro_batches(of_step) for of_step in steps]
        start = time.perf_counter()
        # Before the first step: the proximal policy is the one that the whole batch starts from.
        anchors = [[self._anchor(micro_batch) for micro_batch in of_step] for of_step in micro_batches]
        proximal_s = time.perf_counter() - start if self._loss.anchor == "proximal" else 0.0
        metrics = [self._step(*of_step) for of_step in zip(steps, micro_batches, anchors, strict=True)]
        for index, of_step in enumerate(metrics):
            of_step["time/proximal_s"] = proximal_s if index == 0 else 0.0
        return metrics

    def layout(self) -> tuple[TensorSpec, ...]:
        """The weights that `snapshot` copies: Hugging Face names in the model's order, tied weights once. Any rank may ask."""
        shapes = [(name, full_shape(parameter)) for name, parameter in self._policy.named_parameters()]
        return make_layout(shapes, tensor_dtype(self._model.dtype))

    def snapshot(self, buffer: WeightBuffer | None) -> None:
        """Copy the current weights into rank 0's buffer; the other ranks pass None."""
        views = dict(buffer.views()) if buffer is not None else {}
        for name, weight in gathered_parameters(self._policy.named_parameters()):
            if buffer is not None:
                views[name].copy_(weight)

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs `[len(token_ids) - 1]` of tokens 1.. given those before them, at temperature 1."""
        row = torch.tensor([list(token_ids)], dtype=torch.int64, device=self.device)
        mask = torch.ones_like(row, dtype=torch.bool)
        mask[:, 0] = False
        with torch.no_grad():
            return self._module(row, mask, 1.0)[0, 1:].cpu().numpy()

    def save_checkpoint(self, folder: Path, extra: bytes) -> None:
        """Write all that continues this run: weights, optimizer, random state, and the caller's own `extra` (rank 0's).

        `folder` appears at the end and whole: see `learner.checkpoints`. Raises its `NoRoomError` on a full disk.
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
            checkpoints.publish(folder)
        dist.barrier()

    def load_checkpoint(self, folder: Path) -> bytes:
        """Continue where `folder` was saved; returns the `extra` saved with it."""
        meta = msgspec.json.decode((folder / _META_FILE).read_bytes(), type=CheckpointMeta)
        expected = msgspec.structs.replace(self._meta(), policy_version=meta.policy_version)
        if meta != expected:
            raise ValueError(
                f"checkpoint {folder} was saved with {meta}, this run has {expected}: resume with the same number of "
                "learner processes (launch.learner_processes), train.zero_stage and model.dtype"
            )
        with muted_prints():
            loaded, _ = self._engine.load_checkpoint(str(folder), tag=_STATE_TAG)
        if loaded is None:
            raise FileNotFoundError(f"checkpoint {folder} holds no DeepSpeed state")
        _set_random_state(torch.load(folder / _random_file(self.rank), weights_only=True))
        self.policy_version = meta.policy_version
        return checkpoints.read_extra(folder)

    def save_model(self, folder: Path) -> None:
        """Write weights, config and tokenizer as transformers reads them; rank 0 holds the whole model for it."""
        state: dict[str, Tensor] = {}
        for name, weight in gathered_parameters(self._policy.named_parameters()):
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

    def _micro_batches(self, groups: Sequence[Group]) -> list[MicroBatch]:
        rows = training_rows(groups, divide_by_std=self._loss.advantage_std)
        assigned = assign_rows(rows, micro_batch_tokens=self._train.micro_batch_tokens, world_size=self.world_size)
        return [collate(of_micro_batch).to(self.device) for of_micro_batch in assigned[self.rank]]

    @torch.no_grad()
    def _anchor(self, micro_batch: MicroBatch) -> Tensor:
        """The log-probs that the sequence ratio is taken against, `[rows, tokens]` float32."""
        if self._loss.anchor == "behavior":
            return micro_batch.behavior_logprobs
        return self._module(micro_batch.token_ids, micro_batch.completion_mask, self._temperature)

    def _step(self, groups: Sequence[Group], micro_batches: Sequence[MicroBatch], anchors: Sequence[Tensor]) -> Metrics:
        start = time.perf_counter()
        num_completions = sum(len(group.rollouts) for group in groups)
        packed = gather_tensors(self._accumulate_gradients(micro_batches, anchors, num_completions))
        metrics: Metrics = {**group_metrics(groups, self.policy_version)}
        metrics |= loss_metrics(packed, num_completions=num_completions)
        if self.policy_version > 0:
            del metrics["ratio/first"]
        rate = self._learning_rate()
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

    def _accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], anchors: Sequence[Tensor], num_completions: int
    ) -> Tensor:
        """Gradient of the mean loss over the step's completions on all ranks; returns this rank's packed tally."""
        tally = LossTally(self.device)
        for index, (micro_batch, anchor_logprobs) in enumerate(zip(micro_batches, anchors, strict=True)):
            self._engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            policy_logprobs = self._engine(micro_batch.token_ids, micro_batch.completion_mask, self._temperature)
            loss = gspo_loss(
                policy_logprobs,
                anchor_logprobs,
                micro_batch.completion_mask,
                micro_batch.advantages,
                clip_low=self._loss.clip_low,
                clip_high=self._loss.clip_high,
            )
            # DeepSpeed averages gradients over ranks; the loss is a sum over all of them.
            self._engine.backward(loss.loss_sum * (self.world_size / num_completions))
            tally.add(loss.loss_sum, loss.statistics)
        return tally.packed()

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
        return CheckpointMeta(self.policy_version, self.world_size, self._zero_stage, self._model.dtype)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse a model that changes its logits after the output layer, which `CompletionLogprobs` would not do."""
        row = torch.arange(8, device=self.device)[None] % self._policy.config.get_text_config().vocab_size
        logits = self._policy(input_ids=row[:, :-1], use_cache=False).logits.float()
        expected = logits.log_softmax(dim=-1).gather(-1, row[:, 1:, None]).squeeze(-1)
        mask = torch.ones_like(row, dtype=torch.bool)
        mask[:, 0] = False
        difference = (self._module(row, mask, 1.0)[:, 1:] - expected).abs().max().item()
        # In bfloat16 neighboring numbers near 10 are 0.06 apart, and the two paths may round differently.
        if difference > {"float32": 1e-3, "bfloat16": 0.25}[self._model.dtype]:
            raise ValueError(
                f"model.path: {self._model.path!r} changes its logits after the output layer (soft-capping or scaling; "
                f"log-probs differ by {difference:.3g}), which is not supported"
            )


def _load_policy(model: ModelSection, *, activation_checkpointing: bool) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    policy = AutoModelForCausalLM.from_pretrained(model.path, dtype=tensor_dtype(model.dtype))
    # Dropout would make the policy's log-probs noise beside the engine's, which has none.
    policy.eval()
    if activation_checkpointing:
        policy.gradient_checkpointing_enable()
        for module in policy.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # The layer itself, not what is in it: it checkpoints in training mode only.
                module.training = True
    return policy


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
