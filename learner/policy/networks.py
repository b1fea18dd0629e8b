"""The networks of a learner rank: the policy under DeepSpeed, the frozen reference of the KL, and the routing to replay.

A training step runs each pack up to three times:

| pass | network | gradient | when |
|---|---|---|---|
| `run_frozen` | the policy before the update, its reference | no | once a batch, where objective, critic or KL need it |
| `run` | the policy as it is now | no | each step, for objectives that select tokens of the whole step |
| `run_trained` | the policy as it is now | yes | each step |

A critic with a trunk of its own runs each pack once before the update, and with a gradient in each of its own steps.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.common.models.routing import Routing, record_routing
from offbeat.common.settings.config import Config, has_own_critic
from offbeat.common.weights.flat import tensor_dtype
from offbeat.learner.policy import loading, lora, zero
from offbeat.learner.policy.critic import Critic
from offbeat.learner.policy.flops import FlopCounter, peak_flops
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.packed_attention import use_newest_flash_attention
from offbeat.learner.policy.packing import Pack, pack, unpack, whole_rows
from offbeat.learner.policy.process_group import LearnerRank, gather_tensors
from offbeat.learner.policy.routing_replay import make_replay
from offbeat.learner.policy.sequence_parallel import join_sequence_group


class Outputs(NamedTuple):
    """A network's outputs on a pack, each `[rows, tokens]` float32, 0 on padding."""

    logprobs: Tensor
    entropies: Tensor | None
    """The entropy of each token's distribution; None where no gradient is computed."""
    values: Tensor | None
    """The critic's values; None without a critic."""


class FrozenOutputs(NamedTuple):
    """The outputs of the networks that stay fixed during an update, `[rows, tokens]` float32; None where the run needs none."""

    proximal_logprobs: Tensor | None = None
    """Log-probs under the policy before the update."""
    reference_logprobs: Tensor | None = None
    """Log-probs under the reference of the KL."""
    values: Tensor | None = None
    """The critic's values before the update."""
    experts: Tensor | None = None
    """The experts that the policy's routers chose before the update, `[num_inputs, layers, top_k]`, where they are replayed."""


class Scored(NamedTuple):
    """The policy's scores of given tokens."""

    logprobs: NDArray[np.float32]
    """Log-probs of tokens 1.. given those before them, at temperature 1, `[num_tokens - 1]`."""
    routing: Routing | None
    """Routing of all tokens but the last; None for a dense model."""


class Networks:
    """The networks of this rank. Unless said otherwise every rank calls every method, in the same order."""

    def __init__(self, config: Config, place: LearnerRank) -> None:
        """Load the models of the run. Raises ValueError for a model that cannot be trained."""
        self._config = config
        self.place = place
        self.num_alike = config.train.sequence_parallel_size
        """Number of neighboring ranks that run the same packs."""
        loading.check_compiling(config, place.device)
        sequence_group = join_sequence_group(self.num_alike, world_size=place.world_size)
        self.module = loading.load_policy(config, sequence_group)
        self._flops = FlopCounter(self.module, checkpointing=bool(config.train.activation_checkpointing))
        self._peak_flops = peak_flops(place.device, tensor_dtype(config.model.dtype)) * place.world_size
        deepspeed = zero.deepspeed_config(config.train, config.model.dtype)
        self.zero_stage: int = deepspeed["zero_optimization"]["stage"]
        self.engine: Any = zero.make_engine(self.module, deepspeed, config.train)
        loading.check_policy(self.module, config.model, place.device)
        if self.packs:
            use_newest_flash_attention(self.policy, place.device)
        if loading.compiles_layers(config, self.policy.config, place.device):
            loading.compile_layers(self.module)
        self._replay = make_replay(self.module, config.loss.routing_replay)
        kl = config.kl
        self._has_reference = bool(kl.loss_coef or kl.reward_coef)
        self.reference: CompletionLogprobs | None = None
        # An adapted policy needs no second model: without its adapter it is the initial policy.
        if self._has_reference and (kl.reference or not config.lora.rank):
            self.reference = loading.load_reference(config, place.device, sequence_group)
            loading.check_policy(self.reference, config.model, place.device)
        self.critic: Critic | None = None
        """The critic with a trunk of its own, if the run has one."""
        if has_own_critic(config):
            self.critic = Critic(config, self.module.packing_obstacle)

    @property
    def engines(self) -> list[Any]:
        """DeepSpeed's engines: the policy's, then that of a critic with a trunk of its own, if the run has one."""
        return [self.engine] if self.critic is None else [self.engine, self.critic.engine]

    @property
    def policy(self) -> PreTrainedModel:
        """The model that is trained, without the critic."""
        return self.module.policy

    @property
    def packs(self) -> bool:
        """The policy computes packs; else it computes whole rows."""
        return self.module.packing_obstacle is None

    # Passes

    def run_trained(self, packed: Pack) -> Outputs:
        """Run the policy for a backward pass of `engine`."""
        return self._run(self.engine, packed)

    @torch.no_grad()
    def run(self, packed: Pack) -> Outputs:
        """Run the policy as it is now."""
        return self._run(self.module, packed)

    @torch.no_grad()
    def run_frozen(self, packed: Pack, *, needs_proximal: bool) -> FrozenOutputs:
        """Run the networks that stay fixed during the update, as far as the run needs them."""
        frozen = FrozenOutputs()
        if needs_proximal or self.module.value_head is not None:
            with self._replay.note() as noted:
                outputs = self._run(self.module, packed)
            experts = noted()
            if experts is not None and not self.packs:
                experts = experts[whole_rows(packed.spans, experts.device).places]
            frozen = FrozenOutputs(outputs.logprobs if needs_proximal else None, values=outputs.values, experts=experts)
        if self._has_reference:
            with contextlib.nullcontext() if self.reference is not None else lora.without_adapter(self.policy):
                outputs = self._run(self.reference or self.module, packed)
            frozen = frozen._replace(reference_logprobs=outputs.logprobs)
        if self.critic is not None:
            frozen = frozen._replace(values=self.critic.run(packed))
        return frozen

    def _run(self, network: nn.Module, packed: Pack) -> Outputs:
        """Run a `CompletionLogprobs`, or the DeepSpeed engine around one."""
        if packed.experts is None or self.packs:
            self._replay.force(packed.experts, places=packed.predictors)
        else:
            rows = whole_rows(packed.spans, packed.experts.device)
            self._replay.force(packed.experts[rows.inputs.flatten()], places=rows.places[packed.predictors])
        logprobs, entropies, values = network(*packed.inputs, self._config.rollout.temperature, packed.images)
        return Outputs(
            unpack(logprobs, packed.lengths),
            None if entropies is None else unpack(entropies, packed.lengths),
            None if values is None else unpack(values, packed.lengths),
        )

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Scored:
        """Score at least two given tokens, with the weights that are published."""
        packed = pack([(token_ids[:1], [token_ids[1:]])]).to(self.place.device)
        self._replay.force(None)
        with self.module.whole_packs(), lora.with_merged_weights(self.policy), record_routing(self.policy) as record:
            logprobs, _, _ = self.module(*packed.inputs, 1.0)
        return Scored(logprobs.cpu().numpy(), record.routing())

    # The optimizer step

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the gradients of the pending optimizer step as `full_gradients` does."""
        return zero.full_gradients(self.module.named_parameters(), zero_stage=self.zero_stage)

    def take_gradient(self) -> Tensor:
        """Return `gradients` as one float32 vector in CPU memory, missing ones as 0, and discard the pending step."""
        parameters = dict(self.module.named_parameters())
        gradients = [
            torch.zeros(zero.full_shape(parameters[name])) if gradient is None else gradient.to("cpu", torch.float32, copy=True)
            for name, gradient in self.gradients()
        ]
        zero.discard_gradients(self.engine)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def step(self, learning_rate: float) -> float:
        """Clip the gradients and take the optimizer step; return their norm before clipping."""
        return zero.take_step(self.engine, learning_rate, max_grad_norm=self._config.train.max_grad_norm)

    # Numbers about a step

    def take_replay_metrics(self) -> dict[str, float]:
        """Return the metrics of the routing replayed since the last call; see `RoutingReplay.take_metrics`."""
        return self._replay.take_metrics(num_alike=self.num_alike)

    def utilization(self, packs: Sequence[Pack], seconds: float, *, runs_before: bool) -> dict[str, float]:
        """Return the operations of a step on this rank's `packs`, of all ranks, and their share of what the devices can do.

        With `runs_before` each pack had a `run` before its gradient.
        """
        model, recomputed = (sum(counts) for counts in zip(*map(self._flops.count_training, packs), strict=True))
        if runs_before:
            recomputed += sum(map(self._flops.count_forward, packs))
        counts = torch.tensor([model, recomputed], dtype=torch.float64)
        model, recomputed = gather_tensors(counts, num_alike=self.num_alike).sum(dim=0).tolist()
        return {
            "compute/flops": model,
            "compute/recomputed": recomputed / model,
            "compute/peak": self._peak_flops,
            "compute/mfu": model / (self._peak_flops * seconds),
        }


def write_snapshot(policy: PreTrainedModel, views: dict[str, Tensor] | None, device: torch.device) -> None:
    """Copy the policy's weights into `views` by name, adapters merged, and return when they are whole; a collective.

    Rank 0 has views. The other ranks of its machine should have views of the same memory: under ZeRO-3 each rank then writes
    its own part of every weight, and otherwise a share of the weights. Ranks without views, such as those of another machine,
    send their parts of ZeRO-3 to one that has them. `device` is that of this rank.
    """
    has_views = gather_tensors(torch.tensor(views is not None)).tolist()
    ranks = _Ranks(dist.get_rank(), [rank for rank, has in enumerate(has_views) if has], len(has_views))
    named = list(lora.base_parameters(policy))
    if all(_is_split_over_all(parameter, ranks.num) for _, parameter in named):
        _write_parts(named, views, ranks, device)
    elif any(zero.is_partitioned(parameter) for _, parameter in named):
        # Partitioned in a way of its own, such as over groups of ranks, or lying on a disk.
        for name, weight in lora.merged_parameters(policy):
            if ranks.own == 0 and views is not None:
                views[name].copy_(weight, non_blocking=True)
    elif views is not None:
        _write_share(policy, named, views, ranks)
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
    gather_tensors(torch.tensor(True))


class _Ranks(NamedTuple):
    """The learner's ranks, and which of them write."""

    own: int
    """This process's."""
    writers: list[int]
    """Ranks that have views; rank 0 is the first."""
    num: int

    def writer_of(self, rank: int) -> int:
        """Return the rank that writes what this one holds."""
        if rank in self.writers:
            return rank
        others = [other for other in range(self.num) if other not in self.writers]
        return self.writers[others.index(rank) % len(self.writers)]

    def senders(self) -> list[int]:
        """Return the ranks whose parts this one receives."""
        return [rank for rank in range(self.num) if rank != self.own and self.writer_of(rank) == self.own]


def _is_split_over_all(parameter: nn.Parameter, num_ranks: int) -> bool:
    if not zero.is_partitioned(parameter):
        return False
    split = cast(Any, parameter)
    return split.ds_zero_partition_world_size == num_ranks and split.ds_tensor.final_location is None


def _write_parts(
    named: Sequence[tuple[str, nn.Parameter]], views: dict[str, Tensor] | None, ranks: _Ranks, device: torch.device
) -> None:
    """Write this rank's part of every weight, and those of the ranks that send theirs to it; or send them."""
    for bucket in zero.buckets(named):
        parts = [cast(Tensor, cast(Any, parameter).ds_tensor).detach() for _, parameter in bucket]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        if views is None:
            dist.send(torch.cat([part.to(device, dtype) for part in parts]), ranks.writer_of(ranks.own))
            continue
        targets = [views[lora.base_name(name)].view(-1) for name, _ in bucket]
        _put(parts, targets, ranks.own)
        sizes = [part.numel() for part in parts]
        for sender in ranks.senders():
            received = torch.empty(sum(sizes), dtype=dtype, device=device)
            dist.recv(received, sender)
            _put(received.split(sizes), targets, sender)


def _put(parts: Sequence[Tensor], targets: Sequence[Tensor], rank: int) -> None:
    """Copy a rank's parts to where they belong; the last ones are padded."""
    for part, target in zip(parts, targets, strict=True):
        place = target[part.numel() * rank : part.numel() * (rank + 1)]
        # Into pinned memory, in the order of the device's work.
        place.copy_(part[: place.numel()], non_blocking=True)


def _write_share(
    policy: PreTrainedModel, named: Sequence[tuple[str, nn.Parameter]], views: dict[str, Tensor], ranks: _Ranks
) -> None:
    """Write the weights that begin in this rank's share of the model: every rank holds them whole."""
    total = sum(parameter.numel() for _, parameter in named)
    begin = 0
    for name, parameter in named:
        if ranks.writers[begin * len(ranks.writers) // total] == ranks.own:
            views[lora.base_name(name)].copy_(lora.merged_weight(policy, name, parameter.detach()), non_blocking=True)
        begin += parameter.numel()
