"""The actor's engine on vLLM: `LLMEngine` inside this process, stepped by its owner.

The actor must know under which weights each token was sampled. Therefore vLLM is no server here: the actor makes every step
itself, and changes weights only between two of them.

    submit(prompts) -> step() -> step() -> ... -> completions: tokens, log-probs, segments by policy version
                           load_weights() -> the workers (`vllm_worker.py`) -> score(canary)
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import vllm
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.inputs import MultiModalInput, TokensInput, tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from offbeat.actor.engines import vllm_images
from offbeat.actor.engines.engine import CacheUse, Completion, EngineSettings, Score, check_options, check_prompt_length
from offbeat.actor.engines.vllm_worker import LOAD_FORMAT, WeightLoading
from offbeat.common.errors import LostProcessError, ServiceError, SettingError, one_line
from offbeat.common.models.folders import has_weight_files
from offbeat.common.models.images import ImagePatches
from offbeat.common.processes.process_table import processor_name
from offbeat.common.settings.library_options import RESERVED
from offbeat.common.weights.flat import WeightBuffer
from offbeat.common.weights.nccl_group import gpu_uuid
from offbeat.protocols.message_parts import EngineInfo
from offbeat.protocols.messages import Sampling
from offbeat.protocols.payload import Segment

WRITTEN_FOR = "0.32 or 0.33"
"""vLLM releases whose `INTERNALS` this module uses."""
INTERNALS = (
    "output_processor.request_states",
    "output_processor.add_request",
    "input_processor.process_inputs",
    "input_processor.assign_request_id",
    "engine_core.add_request",
    "engine_core.engine_core.batch_queue",
    "engine_core.engine_core.pause_scheduler",
    "engine_core.engine_core.resume_scheduler",
)
"""Attributes of `LLMEngine` that no release promises: how it takes requests, where it keeps them, and steps in flight."""
CPU_BLOCK_TOKENS = 32
"""Tokens of a block of the cache on a CPU, where vLLM's attention wants a multiple of 32."""
CPU_KV_CACHE_BYTES = 256 << 20
"""KV cache on a CPU unless `kv_cache_memory_bytes` is among the options, or two completions of full length need more.

Left to itself vLLM takes nine tenths of the machine's memory.
"""


class VllmEngine:
    """An `Engine` on vLLM.

    Where vLLM schedules asynchronously (on GPUs), a call of `step` starts the next step before it reads the tokens of the one
    before. Segments are exact, because steps in flight are finished before weights change.
    """

    def __init__(self, model_path: str, settings: EngineSettings) -> None:
        """Load the model; its weights count as version -1. The options are of `vllm.EngineArgs`.

        Experts are recorded on GPUs only.

        From a folder without weights the model is made of its config, and first samples after `load_weights`.

        The process has one seed: on a CPU vLLM samples requests that have seeds of their own one by one, which is slow.
        """
        # Otherwise vLLM runs the model in another process, and weights could change in the middle of a step.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # By default every actor would bind its threads to the first cores, the same for all.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._images = images = settings.images
        fields, _ = PreTrainedConfig.get_config_dict(model_path)
        text_class = _text_class(fields) if images is None else None
        vllm_images.import_classes([text_class] if text_class else fields.get("architectures") or ())
        own = {} if images is None else vllm_images.engine_options(images)
        own |= {"dtype": settings.dtype, "max_model_len": settings.max_model_len, "seed": settings.seed}
        options = settings.options
        if settings.has_turns and current_platform.is_cpu():
            # Only whole blocks of a prompt are cached. vLLM's have 128 tokens on a CPU, more than most turns.
            options = {"block_size": CPU_BLOCK_TOKENS, **options}
        if settings.records_experts:
            own |= {"enable_return_routed_experts": True}
            if current_platform.is_cpu():
                problem = "vLLM records the experts of a mixture on GPUs only"
                raise SettingError("loss.routing_replay", "sampled", problem, 'Set actor.engine="transformers".')
        if settings.sleeps and not current_platform.is_cpu():
            own |= {"enable_sleep_mode": True}
        if text_class is not None:
            own |= {"hf_overrides": {"architectures": [text_class], **settings.options.get("hf_overrides", {})}}
        # vLLM's classes of text refuse the weights of the rest.
        has_files = text_class is None and has_weight_files(model_path)
        if not has_files:
            own |= {"load_format": LOAD_FORMAT}
        config = _engine_config(model_path, own=own, options=options)
        self._engine = LLMEngine.from_vllm_config(config, UsageContext.LLM_CLASS, disable_log_stats=True)
        check_internals(self._engine)
        # The client of an engine that runs in this process.
        self._core = cast(InprocClient, self._engine.engine_core).engine_core
        self.info = _describe(config, settings, has_weight_files=has_files)
        if not has_files:
            self._engine.collective_rpc(WeightLoading.spoil_weights.__name__)
        self._fresh: dict[str, tuple[Sequence[int], Sampling, Sequence[ImagePatches]]] = {}
        """Arguments of `submit` for the unfinished completions whose prompts may not start on keys of earlier weights."""
        self._finished: list[Completion] = []
        """Completions that finished outside of `step`."""
        self._num_ended_tokens = 0
        self.cache_use = CacheUse(0, 0)
        self.num_loads = 0
        self.policy_version: int | None = None

    @property
    def num_unfinished(self) -> int:
        return self._engine.get_num_unfinished_requests() + len(self._finished)

    @property
    def num_generated_tokens(self) -> int:
        return self._num_ended_tokens + self._num_running_tokens()

    def submit(
        self,
        request_ids: list[str],
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        images: Sequence[ImagePatches] = (),
        *,
        cached_at: int | None = None,
    ) -> None:
        check_prompt_length(len(prompt_token_ids), self.info.max_model_len)
        if cached_at is None:
            self._fresh |= dict.fromkeys(request_ids, (prompt_token_ids, sampling, images))
        # `LLMEngine.add_request` would check and convert the same prompt for each completion.
        processed = self._engine.input_processor.process_inputs(
            "",
            self._prompt(prompt_token_ids, images, cached_at),
            _sampling_params(sampling),
            self._engine.get_supported_tasks(),
        )
        for request_id in request_ids:
            request = copy.copy(processed)
            request.request_id = request_id
            self._engine.input_processor.assign_request_id(request)
            self._engine.output_processor.add_request(request, None)
            self._engine.engine_core.add_request(request)

    def step(self) -> list[Completion]:
        finished, self._finished = self._finished, []
        if self._engine.has_unfinished_requests():
            finished += [self._completion(output) for output in self._step_engine()]
        return finished

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        for request_id in ids:
            self._fresh.pop(request_id, None)
        num_running_tokens = self._num_running_tokens()
        self._engine.abort_request(list(ids))
        self._num_ended_tokens += num_running_tokens - self._num_running_tokens()
        self._finished = [completion for completion in self._finished if completion.request_id not in ids]

    def load_weights(self, weights: WeightBuffer, policy_version: int, *, recompute_kv: bool) -> None:
        self._finish_steps_in_flight()
        # Worker processes map the memory: other arguments would be pickled and copied through pipes.
        arguments = (weights.address, weights.layout)
        try:
            self._engine.collective_rpc(WeightLoading.load_shared_weights.__name__, args=arguments)
        except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
            problem = f"vLLM's class for this model does not take the weights of an update ({one_line(error)})"
            raise SettingError("actor.engine", "vllm", problem, 'Set actor.engine = "transformers".') from error
        self.policy_version = policy_version
        self._engine.set_weight_version(str(policy_version))
        self.num_loads += 1
        if self._images is not None:
            # The worker has forgotten the vision tower's outputs; the scheduler must ask for them again.
            self._core.scheduler.reset_encoder_cache()
        if recompute_kv:
            self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        else:
            self._begin_waiting_anew()

    def score(self, token_ids: Sequence[int]) -> Score:
        request_id = "score"
        # Score before all queued work: the learner waits for the canary.
        self._engine.add_request(request_id, self._prompt(token_ids), _SCORING, priority=-1)
        scored = None
        while scored is None:
            # Read the whole list, past the score too: it also holds all others that finished in this step.
            for output in self._step_engine():
                if output.request_id == request_id:
                    scored = output
                else:
                    self._finished.append(self._completion(output))
        assert isinstance(scored.prompt_logprobs, FlatLogprobs)
        return Score(
            # The first token has no log-prob, and so no entry.
            logprobs=np.array(scored.prompt_logprobs.logprobs, np.float32),
            routed_experts=_routed_experts(scored.outputs[0].routed_experts, num_tokens=len(token_ids) - 1),
        )

    def sleep(self) -> None:
        """Give the GPU's memory back until `wake`, which comes before any other call but `submit` and `abort`.

        The weights wait in the host's memory. Unfinished completions go on from a new pass over their prompt and tokens. On a
        CPU the engine stops and gives nothing back.
        """
        self._finish_steps_in_flight()
        # "keep": completions stay; those that run are preempted, because level 1 drops their keys and values.
        self._engine.sleep(1, "keep")

    def wake(self) -> None:
        """Take the memory back that `sleep` has given up."""
        self._engine.wake_up()

    def close(self) -> None:
        with _no_collections():
            self._engine.engine_core.shutdown()

    def _begin_waiting_anew(self) -> None:
        """Submit fresh prompts without a token again: under the salt of an earlier load they would start on its keys."""
        states = self._engine.output_processor.request_states.values()
        waiting = [
            state.external_req_id for state in states if state.detokenizer is None or not state.detokenizer.num_output_tokens()
        ]
        for request_id in waiting:
            if (fresh := self._fresh.get(request_id)) is not None:
                self._engine.abort_request([request_id])
                self.submit([request_id], *fresh)

    def _finish_steps_in_flight(self) -> None:
        """Read the tokens of all steps that have begun; they belong to the weights that the steps began with."""
        if not self._core.batch_queue:
            return
        # "keep": nothing more is scheduled, and running completions stay as they are.
        self._core.pause_scheduler("keep", clear_cache=False)
        while self._core.batch_queue:
            self._finished += [self._completion(output) for output in self._step_engine()]
        self._core.resume_scheduler()

    def _prompt(
        self, token_ids: Sequence[int], images: Sequence[ImagePatches] = (), cached_at: int | None = None
    ) -> TokensInput | MultiModalInput:
        """Return the prompt with a salt, by which it starts on cached keys of prompts with the same salt alone.

        A load has a number of its own: a restarted learner may send other weights under a version that was there before. Keys
        of earlier loads leave the cache when their room is needed.
        """
        salt = str(self.num_loads if cached_at is None else cached_at)
        if not images:
            return tokens_input(list(token_ids), cache_salt=salt)
        assert self._images is not None, "an engine without images gets none"
        return vllm_images.image_prompt(list(token_ids), images, self._images, salt=salt)

    def _step_engine(self) -> list[RequestOutput]:
        """Advance the engine by one step and return the requests that finished."""
        try:
            outputs = self._engine.step()
        except RuntimeError as error:
            executor = self._core.model_executor
            if not (isinstance(executor, MultiprocExecutor) and executor.is_failed):
                raise
            # vLLM's own text is no more than "cancelled".
            raise LostProcessError(
                f"one of vLLM's {executor.world_size} worker processes died (tensor_parallel_size); vLLM's lines above name "
                "it. See whether its machine ran out of memory, and start the actor again"
            ) from error
        return [output for output in outputs if isinstance(output, RequestOutput)]

    def _completion(self, output: RequestOutput) -> Completion:
        sampled = output.outputs[0]
        assert sampled.finish_reason in ("stop", "length"), f"{output.request_id} ended by {sampled.finish_reason}"
        assert isinstance(sampled.logprobs, FlatLogprobs)
        assert sampled.weight_versions is not None
        self._fresh.pop(output.request_id, None)
        token_ids = np.array(sampled.token_ids, np.int32)
        self._num_ended_tokens += len(token_ids)
        use, num_prompt_tokens = self.cache_use, len(output.prompt_token_ids or ())
        num_cached_tokens = use.num_cached_tokens + (output.num_cached_tokens or 0)
        self.cache_use = CacheUse(use.num_prompt_tokens + num_prompt_tokens, num_cached_tokens)
        return Completion(
            request_id=output.request_id,
            token_ids=token_ids,
            behavior_logprobs=np.array(sampled.logprobs.logprobs, np.float32),
            finish_reason=sampled.finish_reason,
            segments=tuple(Segment(int(span.version), span.start) for span in sampled.weight_versions),
            experts=_routed_experts(sampled.routed_experts, num_tokens=num_prompt_tokens + len(token_ids) - 1),
        )

    def _num_running_tokens(self) -> int:
        states = self._engine.output_processor.request_states.values()
        return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)


def check_internals(engine: LLMEngine) -> None:
    """Raise `ServiceError` unless this vLLM has the `INTERNALS`."""
    for name in INTERNALS:
        try:
            operator.attrgetter(name)(engine)
        except AttributeError as error:
            raise ServiceError(
                f"vLLM {vllm.__version__} has no LLMEngine.{name}, which the actor needs: install vLLM {WRITTEN_FOR}, or set "
                "actor.engine to transformers"
            ) from error


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Ignore calls of `gc.collect`: vLLM's at its shutdown look at a million objects, for a process that is about to end."""
    collect = gc.collect
    gc.collect = lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect


def _describe(config: VllmConfig, settings: EngineSettings, *, has_weight_files: bool) -> EngineInfo:
    return EngineInfo(
        name="vllm",
        version=vllm.__version__,
        dtype=settings.dtype,
        device=current_platform.device_type,
        max_model_len=config.model_config.max_model_len,
        hashes=settings.hashes,
        gpu=gpu_uuid(0) if current_platform.is_cuda() else None,
        quantization=quantization_of(config),
        takes_images=settings.images is not None,
        has_weight_files=has_weight_files,
        processor=processor_name(current_platform.device_type),
    )


def quantization_of(config: VllmConfig) -> str:
    """Return the numbers of fewer bits that an engine computes with, in words; empty for none."""
    weights, cache = config.model_config.quantization, config.cache_config.cache_dtype
    parts = [f"{weights} weights"] if weights else []
    if cache not in ("auto", "float16", "bfloat16", "float32"):
        parts.append(f"{cache} KV cache")
    return ", ".join(parts)


def _routed_experts(recorded: np.ndarray | None, *, num_tokens: int) -> np.ndarray | None:
    """Return the experts of the first tokens, int32 `[num_tokens, layers, top_k]`, of the layers that have experts.

    None without the option `enable_return_routed_experts`. `recorded` has all layers of the model. vLLM records on GPUs only,
    where this is not tested.
    """
    if recorded is None:
        return None
    experts = recorded[:num_tokens].astype(np.int32)
    # Only a layer without experts is recorded as zeros: the `top_k` experts of a token differ from each other.
    return experts[:, experts.any(axis=(0, 2))]


_SCORING = SamplingParams(
    max_tokens=1,
    prompt_logprobs=0,
    flat_logprobs=True,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
    skip_clone=True,
)


def _text_class(fields: Mapping[str, Any]) -> str | None:
    """Return the class of the language model in a folder with more, where that is a class of its own, as Qwen3.5 has it.

    A learner of text loads this class, and names its weights otherwise than the whole model does. `fields`: of config.json.
    """
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(fields.get("model_type")))
    return name if "text_config" in fields and name not in (fields.get("architectures") or ()) else None


@functools.cache
def _sampling_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        logprobs=0,  # the sampled token's alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _engine_config(model_path: str, *, own: Mapping[str, Any], options: Mapping[str, Any]) -> VllmConfig:
    check_options(options, [field.name for field in dataclasses.fields(EngineArgs)], RESERVED["vllm"])
    arguments: dict[str, Any] = {
        # Compiling takes 40 s on a CPU and gains a third there.
        "enforce_eager": current_platform.is_cpu(),
        "use_tqdm_on_load": False,
        **options,
        **own,
        "model": model_path,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "worker_extension_cls": f"{WeightLoading.__module__}.{WeightLoading.__qualname__}",
    }
    try:
        engine_arguments = EngineArgs(**arguments)
        config = engine_arguments.create_engine_config(UsageContext.LLM_CLASS)
    except (TypeError, ValueError) as error:
        problem = f"vLLM refuses the options ({one_line(error)})"
        cure = "Correct them, or remove the setting."
        raise SettingError("actor.engine_options", dict(options), problem, cure) from error
    if current_platform.is_cpu() and config.cache_config.kv_cache_memory_bytes is None:
        config.cache_config.kv_cache_memory_bytes = _cpu_kv_cache_bytes(config)
    return config


def _cpu_kv_cache_bytes(config: VllmConfig) -> int:
    model, parallel = config.model_config, config.parallel_config
    assert isinstance(model.dtype, torch.dtype)
    numbers_per_token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    # One more block for each completion, because its last block is partly empty.
    num_tokens = 2 * (model.max_model_len + config.cache_config.block_size)
    return max(CPU_KV_CACHE_BYTES, num_tokens * numbers_per_token * model.dtype.itemsize)
