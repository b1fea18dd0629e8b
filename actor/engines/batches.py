"""Batches of completions of the transformers engine, stepped by the caller.

A model that keeps keys and values alone has a paged cache, and transformers' continuous batching. Any other has the caches
that it makes itself: states, convolutions, windows, sinks. There, completions of one prompt that are added together are a
batch: they begin with the same inputs and grow by a token in each step, so they are of one length and need no padding.
"""

import contextlib
import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestState
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs, ContinuousBatchingIOs

from offbeat.actor.engines.engine import EngineSettings, check_options
from offbeat.common.errors import SettingError
from offbeat.common.models.routing import record_routing
from offbeat.common.settings.library_options import RESERVED, SHARE_OPTIONS


class FinishedCompletion(NamedTuple):
    """A finished completion of either kind of batches."""

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    experts: NDArray[np.uint8] | None
    """See `Completion.experts`."""


class ExpertRecord:
    """The experts that unfinished completions of a model went to."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._recorded: dict[str, list[tuple[int, NDArray[np.uint8]]]] = defaultdict(list)
        """The stretches of each request: index of the first token, and the experts. A later one replaces an earlier one."""

    @contextlib.contextmanager
    def recording(self, batch: ContinuousBatchingIOs | ContinuousBatchingAsyncIOs) -> Iterator[None]:
        """Record the batch that the model runs meanwhile."""
        assert isinstance(batch, ContinuousBatchingIOs), "asynchronous batching is off"
        with record_routing(self._model) as record:
            yield
        routing = record.routing()
        assert routing is not None, "the learner has refused a model whose routers do not return their choice"
        experts = routing.experts.numpy().astype(np.uint8)
        start = 0
        for request in batch.requests_in_batch:
            end = start + request.query_length
            state = request.state
            self._recorded[state.request_id].append((state.position_offset - request.query_length, experts[start:end]))
            start = end

    def take(self, request_id: str) -> NDArray[np.uint8] | None:
        """Return the experts of a request's inputs, `[tokens, layers, top_k]`, and forget them; None where it had none."""
        stretches = self._recorded.pop(request_id, [])
        if not stretches:
            return None
        num_tokens = max(first + len(experts) for first, experts in stretches)
        whole = np.zeros((num_tokens, *stretches[0][1].shape[1:]), dtype=np.uint8)
        for first, experts in stretches:
            whole[first : first + len(experts)] = experts
        return whole


class PagedBatches:
    """Unfinished completions in transformers' manager, whose thread is never started; `step` does the work of that loop."""

    def __init__(self, model: PreTrainedModel, settings: EngineSettings, eos_token_ids: Sequence[int]) -> None:
        """Make the cache, and run the model once. `options` are of `ContinuousBatchingConfig`."""
        config = _batching_config(model.device, settings)
        # A temperature other than 1 creates the processor that applies each request's temperature; top_k and top_p are off.
        generation = GenerationConfig(do_sample=True, temperature=0.5, top_k=0, top_p=1.0, eos_token_id=-1)
        manager: ContinuousBatchingManager = model.init_continuous_batching(  # pyright: ignore[reportCallIssue]
            generation, config
        )
        manager.warmup()
        assert manager.batch_processor is not None
        self._model = model
        self._eos_token_ids = list(eos_token_ids)
        self._batches = manager.batch_processor
        self._outputs = manager.output_router.output_queue
        self._experts: ExpertRecord | None = ExpertRecord(model) if settings.records_experts else None

    def add(self, request_ids: Sequence[str], prompt: Sequence[int], *, max_new_tokens: int, temperature: float) -> None:
        """Queue a completion of the prompt for each id."""
        for request_id in request_ids:
            self._batches.scheduler.add_waiting_request(
                RequestState(
                    request_id,
                    list(prompt),
                    max_new_tokens=max_new_tokens,
                    eos_token_id=self._eos_token_ids,
                    logit_processor_kwargs={"temperature": temperature},
                    # `_num_tokens` counts from here, also after generated tokens have become part of the prompt.
                    _true_initial_tokens=len(prompt),
                )
            )

    def step(self) -> list[FinishedCompletion]:
        """Sample a token for the running completions; return those that finished."""
        batches = self._batches
        if not batches.scheduler.active_requests:
            # Set by a full cache until a running completion finishes; these have been restarted or removed.
            batches.scheduler.block_new_requests = False
        if not batches.prepare_next_batch():
            return []
        batch = batches.inputs_and_outputs.get_model_kwargs(use_padding=batches.model_runner.pad_inputs)
        with self._experts.recording(batches.inputs_and_outputs) if self._experts else contextlib.nullcontext():
            batches.model_runner.compute_batch(self._model, dict(batch))
        batches.inputs_and_outputs.retrieve_device_outputs()
        batches.update_batch()
        finished = []
        while not self._outputs.empty():
            output = self._outputs.get()
            if output.error is not None:
                raise RuntimeError(f"transformers failed on request {output.request_id}: {output.error}")
            experts = None if self._experts is None else self._experts.take(output.request_id)
            finished.append(FinishedCompletion(output.request_id, output.generated_tokens, output.logprobs, experts))
        return finished

    def remove(self, request_ids: Iterable[str]) -> int:
        """Forget these completions; return the number of their tokens."""
        for request_id in request_ids:
            if self._experts is not None:
                self._experts.take(request_id)
            self._batches.scheduler.set_request_cancellation(request_id)
        num_tokens = 0
        for state in self._batches.scheduler.clear_cancelled_requests():
            num_tokens += _num_tokens(state)
            self._batches.offloading_manager.free_request_cpu_cache(state)
        return num_tokens

    def num_tokens(self) -> dict[str, int]:
        """Return the number of tokens sampled so far of every unfinished completion."""
        scheduler = self._batches.scheduler
        states = [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]
        return {state.request_id: _num_tokens(state) for state in states}

    def restart(self, *, keeps_begun: bool) -> None:
        """Continue running completions from a new pass over their prompt and tokens.

        `keeps_begun`: only those that have no token, because a part of their prompt may have been computed.
        """
        # They go before waiting requests, which are younger.
        scheduler = self._batches.scheduler
        for state in reversed(list(scheduler.active_requests.values())):
            if keeps_begun and _num_tokens(state):
                continue
            scheduler.finish_request(state.request_id)
            scheduler.waiting_requests[state.request_id] = state.create_equivalent_initial_request()
            scheduler.waiting_requests_order.appendleft(state.request_id)


def _num_tokens(state: RequestState) -> int:
    """Return the number of tokens sampled so far."""
    return len(state.initial_tokens) + len(state.generated_tokens) - state._true_initial_tokens


def _batching_config(device: torch.device, settings: EngineSettings) -> ContinuousBatchingConfig:
    check_options(
        settings.options, [field.name for field in dataclasses.fields(ContinuousBatchingConfig)], RESERVED["transformers"]
    )
    arguments: dict[str, Any] = {"auto_switch_to_flash": False}
    if device.type == "cpu":
        # By default it takes nine tenths of the machine's memory.
        arguments |= {"page_size": 64, "num_blocks": max(512, settings.max_model_len // 16), "max_batch_tokens": 512}
    arguments |= settings.options
    if settings.records_experts:
        # A graph that is replayed runs none of the hooks that record.
        arguments["use_cuda_graph"] = False
    return ContinuousBatchingConfig(
        **arguments,
        return_logprobs=True,
        per_request_processors=True,
        use_async_batching=False,
        allow_block_sharing=False,
        seed=settings.seed,
    )


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
        """The number of tokens sampled so far of each completion."""
        return len(self.token_ids[0])


class OwnCaches:
    """Unfinished completions, a pass for each batch in every step; see `PagedBatches` for the methods."""

    def __init__(self, model: PreTrainedModel, settings: EngineSettings, eos_token_ids: Sequence[int]) -> None:
        """Make no cache yet: each batch has its own, from its first pass to its end."""
        for name, value in settings.options.items():
            if name == SHARE_OPTIONS["transformers"]:
                # Without a paged cache no memory is set aside.
                continue
            problem = f"{type(model).__name__} has no paged cache, which transformers' continuous batching needs"
            raise SettingError(f"actor.engine_options.{name}", value, problem, "Remove it.")
        self._model = model
        self._eos_token_ids = set(eos_token_ids)
        self._records_experts = settings.records_experts
        # Mamba has a name of its own for it, and newer versions of transformers another one for all models. A name that a
        # model does not have may be ignored, and the model would then continue from nothing.
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next(name for name in ("cache", "cache_params", "past_key_values") if name in parameters)
        self._random = torch.Generator(model.device).manual_seed(settings.seed)
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

    def restart(self, *, keeps_begun: bool) -> None:
        """Continue running completions from a new pass over their prompt and tokens; a prompt is computed in one step."""
        if keeps_begun:
            return
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
