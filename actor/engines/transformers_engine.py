"""The actor's engine on transformers' continuous batching: slower than vLLM, and nothing more to install."""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestState
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs, ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import GENERATION_CONFIG_NAME

from offbeat.actor.engines.engine import CacheUse, Completion, Score, check_options, check_prompt_length
from offbeat.actor.engines.reserved_options import RESERVED
from offbeat.common.models.folders import has_weight_files
from offbeat.common.models.images import ImagePatches
from offbeat.common.models.routing import record_routing
from offbeat.common.processes.processors import processor_name
from offbeat.common.weights.flat import WeightBuffer, tensor_dtype
from offbeat.common.weights.nccl_group import gpu_uuid
from offbeat.protocols.message_parts import EngineInfo, ModelHashes
from offbeat.protocols.messages import Sampling
from offbeat.protocols.payload import Segment

GREEDY_TEMPERATURE = 1e-6
"""Replaces temperature 0: an engine either samples all its completions or none."""


class ExpertRecord:
    """The experts that unfinished completions of a model went to."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._recorded: dict[str, list[tuple[int, NDArray[np.uint8]]]] = defaultdict(list)
        """For each request its stretches of tokens, each with the index of the first one; a later one replaces an earlier."""

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


class TransformersEngine:
    """An `Engine` on transformers. Its manager's thread is never started; `step` does the work of that loop."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        max_model_len: int,
        hashes: ModelHashes,
        seed: int,
        options: Mapping[str, Any],
        records_experts: bool = False,
    ) -> None:
        """Load the model; its weights count as version -1. `options` are of `ContinuousBatchingConfig`.

        With `records_experts` completions come with their experts, and no CUDA graphs are used.

        From a folder without weights the model is made of its config, and first samples after `load_weights`.

        `seed` seeds the random state of the process; no two actors may share it.
        """
        transformers.utils.logging.disable_progress_bar()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if records_experts:
            # A graph that is replayed runs none of the hooks that record.
            options = {**options, "use_cuda_graph": False}
        config = _batching_config(device, max_model_len=max_model_len, seed=seed, options=options)
        has_files = has_weight_files(model_path)
        make = _load_model if has_files else _make_model
        self._model: PreTrainedModel = make(model_path, tensor_dtype(dtype))
        nn.Module.to(self._model, device)
        self._eos_token_ids = _eos_token_ids(self._model, model_path)
        manager: ContinuousBatchingManager = self._model.init_continuous_batching(  # pyright: ignore[reportCallIssue]
            _generation_config(), config
        )
        manager.warmup()
        if not has_files:
            _spoil(self._model)
        assert manager.batch_processor is not None
        self._batches = manager.batch_processor
        self._outputs = manager.output_router.output_queue
        self._info = EngineInfo(
            name="transformers",
            version=transformers.__version__,
            dtype=dtype,
            device=device.type,
            max_model_len=max_model_len,
            hashes=hashes,
            gpu=gpu_uuid(0) if device.type == "cuda" else None,
            has_weight_files=has_files,
            processor=processor_name(device.type),
        )
        self._policy_version: int | None = None
        self._segments: dict[str, list[Segment]] = {}
        """Segments of every unfinished completion, by request id."""
        self._experts: ExpertRecord | None = ExpertRecord(self._model) if records_experts else None
        self._num_ended_tokens = 0
        self._num_loads = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def policy_version(self) -> int | None:
        return self._policy_version

    @property
    def num_loads(self) -> int:
        return self._num_loads

    @property
    def cache_use(self) -> CacheUse:
        return CacheUse(0, 0)

    @property
    def num_unfinished(self) -> int:
        return len(self._segments)

    @property
    def num_generated_tokens(self) -> int:
        return self._num_ended_tokens + sum(_num_tokens(state) for state in self._states())

    def submit(
        self,
        request_ids: list[str],
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        images: Sequence[ImagePatches] = (),
        *,
        cached_at: int | None = None,
    ) -> None:
        assert not images, "this engine takes no images"
        num_prompt_tokens = len(prompt_token_ids)
        check_prompt_length(num_prompt_tokens, self._info.max_model_len)
        assert self._policy_version is not None, "weights come before prompts"
        for request_id in request_ids:
            self._segments[request_id] = [Segment(self._policy_version, 0)]
            self._batches.scheduler.add_waiting_request(
                RequestState(
                    request_id,
                    list(prompt_token_ids),
                    max_new_tokens=min(sampling.max_new_tokens, self._info.max_model_len - num_prompt_tokens),
                    eos_token_id=self._eos_token_ids,
                    logit_processor_kwargs={"temperature": float(sampling.temperature or GREEDY_TEMPERATURE)},
                    # `_num_tokens` counts from here, also after generated tokens have become part of the prompt.
                    _true_initial_tokens=num_prompt_tokens,
                )
            )

    @torch.inference_mode()
    def step(self) -> list[Completion]:
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
            finished.append(self._completion(self._outputs.get()))
        return finished

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._segments.pop(request_id, None)
            if self._experts is not None:
                self._experts.take(request_id)
            self._batches.scheduler.set_request_cancellation(request_id)
        for state in self._batches.scheduler.clear_cancelled_requests():
            self._num_ended_tokens += _num_tokens(state)
            self._batches.offloading_manager.free_request_cpu_cache(state)

    def load_weights(self, weights: WeightBuffer, policy_version: int, *, recompute_kv: bool) -> None:
        self._copy_weights(dict(weights.views()))
        self._policy_version = policy_version
        self._num_loads += 1
        for state in self._states():
            _begin_segment(self._segments[state.request_id], Segment(policy_version, _num_tokens(state)))
        if recompute_kv:
            self._restart_active()

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> Score:
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        with record_routing(self._model) as record:
            logprobs = self._model(ids[:, :-1], use_cache=False).logits[0].float().log_softmax(-1)
        routing = record.routing()
        return Score(
            logprobs=logprobs.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy(),
            routed_experts=None if routing is None else routing.experts.numpy().astype(np.int32),
        )

    def close(self) -> None:
        del self._batches, self._model

    def _states(self) -> Iterator[RequestState]:
        """Yield the batching state of every unfinished completion."""
        yield from self._batches.scheduler.active_requests.values()
        yield from self._batches.scheduler.waiting_requests.values()

    def _completion(self, output: GenerationOutput) -> Completion:
        if output.error is not None:
            raise RuntimeError(f"transformers failed on request {output.request_id}: {output.error}")
        self._num_ended_tokens += len(output.generated_tokens)
        return Completion(
            request_id=output.request_id,
            token_ids=np.array(output.generated_tokens, np.int32),
            behavior_logprobs=np.array(output.logprobs, np.float32),
            finish_reason="stop" if output.generated_tokens[-1] in self._eos_token_ids else "length",
            segments=tuple(self._segments.pop(output.request_id)),
            experts=None if self._experts is None else self._experts.take(output.request_id),
        )

    @torch.no_grad()
    def _copy_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        parameters = dict(self._model.named_parameters())
        if parameters.keys() != weights.keys():
            difference = sorted(parameters.keys() ^ weights.keys())
            raise ValueError(f"not the parameters of this model; {len(difference)} differ, first {difference[0]}")
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])

    def _restart_active(self) -> None:
        """Continue every running completion from a new prefill of its prompt and tokens.

        They go before waiting requests, which are younger.
        """
        scheduler = self._batches.scheduler
        for state in reversed(list(scheduler.active_requests.values())):
            scheduler.finish_request(state.request_id)
            scheduler.waiting_requests[state.request_id] = state.create_equivalent_initial_request()
            scheduler.waiting_requests_order.appendleft(state.request_id)


def _load_model(folder: str, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def _make_model(folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a folder without weights, as `_load_model` would return it but for them."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if Path(folder, GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


@torch.no_grad()
def _spoil(model: PreTrainedModel) -> None:
    """Make every weight NaN: one that no update reaches then shows in the first score of the canary."""
    for parameter in model.parameters():
        parameter.fill_(torch.nan)


def _num_tokens(state: RequestState) -> int:
    """Return the number of tokens sampled so far."""
    return len(state.initial_tokens) + len(state.generated_tokens) - state._true_initial_tokens


def _begin_segment(segments: list[Segment], segment: Segment) -> None:
    """Append `segment`; it replaces the last one if no token was sampled in that."""
    if segments[-1].first_token == segment.first_token:
        segments.pop()
    segments.append(segment)


def _eos_token_ids(model: PreTrainedModel, model_path: str) -> list[int]:
    """Return the ids that end a completion: those of the model's generation config and the tokenizer's, as in vLLM."""
    assert model.generation_config is not None
    configured = model.generation_config.eos_token_id
    ids = set(configured) if isinstance(configured, list) else {configured}
    ids.add(AutoTokenizer.from_pretrained(model_path).eos_token_id)
    return sorted(ids - {None})


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
