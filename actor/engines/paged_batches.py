"""Completions of the transformers engine on a paged cache: transformers' continuous batching, stepped by the caller."""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestState
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs, ContinuousBatchingIOs

from offbeat.actor.engines.engine import FinishedCompletion, check_options
from offbeat.actor.engines.reserved_options import RESERVED
from offbeat.common.models.routing import record_routing


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
        """Make the cache, and run the model once. `options` are of `ContinuousBatchingConfig`."""
        if records_experts:
            # A graph that is replayed runs none of the hooks that record.
            options = {**options, "use_cuda_graph": False}
        config = _batching_config(model.device, max_model_len=max_model_len, seed=seed, options=options)
        manager: ContinuousBatchingManager = model.init_continuous_batching(  # pyright: ignore[reportCallIssue]
            _generation_config(), config
        )
        manager.warmup()
        assert manager.batch_processor is not None
        self._model = model
        self._eos_token_ids = list(eos_token_ids)
        self._batches = manager.batch_processor
        self._outputs = manager.output_router.output_queue
        self._experts: ExpertRecord | None = ExpertRecord(model) if records_experts else None

    def add(self, request_ids: Sequence[str], prompt: Sequence[int], *, max_new_tokens: int, temperature: float) -> None:
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
        batches = self._batches
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
        return {state.request_id: _num_tokens(state) for state in self._states()}

    def restart(self) -> None:
        # They go before waiting requests, which are younger.
        scheduler = self._batches.scheduler
        for state in reversed(list(scheduler.active_requests.values())):
            scheduler.finish_request(state.request_id)
            scheduler.waiting_requests[state.request_id] = state.create_equivalent_initial_request()
            scheduler.waiting_requests_order.appendleft(state.request_id)

    def _states(self) -> Iterator[RequestState]:
        """Yield the batching state of every unfinished completion."""
        yield from self._batches.scheduler.active_requests.values()
        yield from self._batches.scheduler.waiting_requests.values()


def _num_tokens(state: RequestState) -> int:
    """Return the number of tokens sampled so far."""
    return len(state.initial_tokens) + len(state.generated_tokens) - state._true_initial_tokens


def _generation_config() -> GenerationConfig:
    # A temperature other than 1 creates the processor that applies each request's temperature; top_k and top_p are off.
    return GenerationConfig(do_sample=True, temperature=0.5, top_k=0, top_p=1.0, eos_token_id=-1)


def _batching_config(
    device: torch.device, *, max_model_len: int, seed: int, options: Mapping[str, Any]
) -> ContinuousBatchingConfig:
    check_options(options, [field.name for field in dataclasses.fields(ContinuousBatchingConfig)], RESERVED["transformers"])
    arguments: dict[str, Any] = {"auto_switch_to_flash": False}
    if device.type == "cpu":
        # By default it takes nine tenths of the machine's memory.
        arguments |= {"page_size": 64, "num_blocks": max(512, max_model_len // 16), "max_batch_tokens": 512}
    arguments |= options
    return ContinuousBatchingConfig(
        **arguments,
        return_logprobs=True,
        per_request_processors=True,
        use_async_batching=False,
        allow_block_sharing=False,
        seed=seed,
    )
