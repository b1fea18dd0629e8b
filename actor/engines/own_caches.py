"""Completions of the transformers engine on the caches that a model makes itself: states, convolutions, windows, sinks.

Completions of one prompt that are added together are a batch: they begin with the same inputs and grow by a token in each step,
so they are of one length and need no padding, whatever the layers keep of the past.
"""

import contextlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from offbeat.actor.engines.engine import FinishedCompletion
from offbeat.common.errors import SettingError
from offbeat.common.models.routing import record_routing


@dataclass
class _Batch:
    """Completions of one prompt that are as long as each other."""

    request_ids: list[str]
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    cache: Cache | None = None
    """The model's cache of all tokens but the last ones; None before the first pass, and after `restart`."""
    token_ids: list[list[int]] = field(default_factory=list)
    """Sampled tokens of each completion."""
    logprobs: list[list[float]] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    """Experts of each pass, `[rows, inputs, layers, top_k]` uint8."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids[0])


class OwnCaches:
    """Unfinished completions, a pass for each batch in every step."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        seed: int,
        options: Mapping[str, Any],
        records_experts: bool,
    ) -> None:
        """Make no cache yet: each batch has its own, from its first pass to its end."""
        for name, value in options.items():
            problem = f"{type(model).__name__} has no paged cache, which transformers' continuous batching needs"
            raise SettingError(f"actor.engine_options.{name}", value, problem, "Remove it.")
        self._model = model
        self._eos_token_ids = set(eos_token_ids)
        self._records_experts = records_experts
        # Mamba has a name of its own for it.
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._random = torch.Generator(model.device).manual_seed(seed)
        self._batches: list[_Batch] = []

    def add(self, request_ids: Sequence[str], prompt: Sequence[int], *, max_new_tokens: int, temperature: float) -> None:
        empty: list[list[Any]] = [[[] for _ in request_ids] for _ in range(2)]
        batch = _Batch(list(request_ids), list(prompt), max_new_tokens, temperature, None, *empty)
        self._batches.append(batch)

    def step(self) -> list[FinishedCompletion]:
        finished: list[FinishedCompletion] = []
        for batch in self._batches:
            logits = self._next_logits(batch)
            logprobs = (logits.float() / batch.temperature).log_softmax(dim=-1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=self._random)
            of_tokens = logprobs.gather(-1, tokens)[:, 0].tolist()
            for row, (token, logprob) in enumerate(zip(tokens[:, 0].tolist(), of_tokens, strict=True)):
                batch.token_ids[row].append(token)
                batch.logprobs[row].append(logprob)
            is_full = batch.num_tokens >= batch.max_new_tokens
            ended = [row for row, ids in enumerate(batch.token_ids) if is_full or ids[-1] in self._eos_token_ids]
            finished += [self._sampled(batch, row) for row in ended]
            _keep(batch, set(range(len(batch.request_ids))) - set(ended))
        self._batches = [batch for batch in self._batches if batch.request_ids]
        return finished

    def remove(self, request_ids: Iterable[str]) -> int:
        gone = set(request_ids)
        num_tokens = 0
        for batch in self._batches:
            kept = {row for row, request_id in enumerate(batch.request_ids) if request_id not in gone}
            num_tokens += sum(len(ids) for row, ids in enumerate(batch.token_ids) if row not in kept)
            _keep(batch, kept)
        self._batches = [batch for batch in self._batches if batch.request_ids]
        return num_tokens

    def num_tokens(self) -> dict[str, int]:
        return {request_id: batch.num_tokens for batch in self._batches for request_id in batch.request_ids}

    def restart(self) -> None:
        for batch in self._batches:
            batch.cache = None
            batch.experts = []

    def _next_logits(self, batch: _Batch) -> Tensor:
        """Run the model on what the cache lacks; return the logits of the next token, `[rows, vocabulary]`."""
        num_rows = len(batch.request_ids)
        if batch.cache is not None:
            return self._pass(batch, [ids[-1:] for ids in batch.token_ids])[:, -1]
        if batch.num_tokens:
            return self._pass(batch, [batch.prompt + ids for ids in batch.token_ids])[:, -1]
        # The prompt is computed once; then each completion has the cache of a row of its own.
        logits = self._pass(batch, [batch.prompt])[:, -1]
        assert batch.cache is not None
        batch.cache.reorder_cache(torch.zeros(num_rows, dtype=torch.int64, device=logits.device))
        batch.experts = [experts.expand(num_rows, -1, -1, -1) for experts in batch.experts]
        return logits.expand(num_rows, -1)

    def _pass(self, batch: _Batch, inputs: list[list[int]]) -> Tensor:
        ids = torch.tensor(inputs, device=self._model.device)
        with record_routing(self._model) if self._records_experts else contextlib.nullcontext() as record:
            outputs = self._model(input_ids=ids, use_cache=True, **{self._cache_name: batch.cache})
        batch.cache = outputs[self._cache_name]
        if record is not None:
            routing = record.routing()
            assert routing is not None, "the learner has refused a model whose routers do not return their choice"
            batch.experts.append(routing.experts.to(torch.uint8).unflatten(0, ids.shape))
        return outputs.logits

    def _sampled(self, batch: _Batch, row: int) -> FinishedCompletion:
        experts = torch.cat([of_pass[row] for of_pass in batch.experts]).numpy() if self._records_experts else None
        return FinishedCompletion(batch.request_ids[row], batch.token_ids[row], batch.logprobs[row], experts)


def _keep(batch: _Batch, rows: set[int]) -> None:
    """Drop the other completions."""
    if len(rows) == len(batch.request_ids):
        return
    kept = sorted(rows)
    batch.request_ids = [batch.request_ids[row] for row in kept]
    batch.token_ids = [batch.token_ids[row] for row in kept]
    batch.logprobs = [batch.logprobs[row] for row in kept]
    batch.experts = [of_pass[kept] for of_pass in batch.experts]
    if batch.cache is not None and kept:
        batch.cache.reorder_cache(cast(torch.LongTensor, torch.tensor(kept)))
