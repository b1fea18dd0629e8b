"""Gives older releases of torch, transformers and vLLM what offbeat uses of newer ones.

A GPU machine without network has the torch of its image, and so a vLLM that was built against it. Nothing is imported here:
each module is completed right after its own import. The kit installs this file as `sitecustomize`, for every process.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import runpy
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple


class WeightVersionSpan(NamedTuple):
    """Output tokens `[start, end)` were sampled by weights labelled `version`."""

    version: str
    start: int
    end: int


def _complete_llm_engine(module: Any) -> None:
    def set_weight_version(self: Any, weight_version: str) -> None:
        # Exact, because offbeat finishes the steps in flight before it changes weights.
        self.output_processor.weight_version = weight_version

    module.LLMEngine.set_weight_version = set_weight_version


def _complete_output_processor(module: Any) -> None:
    process_outputs, new_output = module.OutputProcessor.process_outputs, module.RequestState._new_completion_output

    def process_and_track(self: Any, engine_core_outputs: Any, *arguments: Any, **options: Any) -> Any:
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is None or state.detokenizer is None or not output.new_token_ids:
                continue
            starts = state.__dict__.setdefault("weight_version_starts", [])
            if not starts or starts[-1][0] != self.weight_version:
                starts.append((self.weight_version, state.detokenizer.num_output_tokens()))
        return process_outputs(self, engine_core_outputs, *arguments, **options)

    def new_output_with_versions(self: Any, *arguments: Any, **options: Any) -> Any:
        made = new_output(self, *arguments, **options)
        starts = self.__dict__.get("weight_version_starts", [])
        if made.finish_reason is not None:
            ends = [start for _, start in starts[1:]] + [self.detokenizer.num_output_tokens()]
            spans = zip(starts, ends if starts else [], strict=True)
            made.weight_versions = [WeightVersionSpan(version, start, end) for (version, start), end in spans]
        return made

    module.OutputProcessor.weight_version = "default"
    module.OutputProcessor.process_outputs = process_and_track
    module.RequestState._new_completion_output = new_output_with_versions


def _complete_outputs(module: Any) -> None:
    module.CompletionOutput.weight_versions = None


def _complete_runner(module: Any) -> None:
    # offbeat gives vLLM whole weights, never adapters.
    module.LoRAModelRunnerMixin.reset_lora_state = lambda self: None


def _complete_nccl(module: Any) -> None:
    # Older releases pin settings in batch-invariant mode alone.
    module.unpinned_nccl_env = contextlib.nullcontext


def _complete_entrypoints(module: Any) -> None:
    for name in ("launchers", "launchers.api_server", "launchers.api_server.entry"):
        made = sys.modules[f"{module.__name__}.{name}"] = ModuleType(f"{module.__name__}.{name}")
        made.__path__ = []
    made.__dict__["main"] = lambda: runpy.run_module(f"{module.__name__}.openai.api_server", run_name="__main__")


def _complete_varlen(module: Any) -> None:
    varlen_attn = module.varlen_attn

    def varlen_attn_of_groups(
        query: Any, key: Any, value: Any, *arguments: Any, enable_gqa: bool = False, **options: Any
    ) -> Any:
        if enable_gqa:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        return varlen_attn(query, key, value, *arguments, **options)

    module.varlen_attn = varlen_attn_of_groups


def _complete_batching_config(module: Any) -> None:
    make = module.ContinuousBatchingConfig.__init__

    def make_from_newer(self: Any, *arguments: Any, auto_switch_to_flash: bool = False, **options: Any) -> None:
        # Older releases never switch the attention, and call pages blocks.
        if "page_size" in options:
            options["block_size"] = options.pop("page_size")
        make(self, *arguments, **options)

    module.ContinuousBatchingConfig.__init__ = make_from_newer


def _complete_paged_attention(module: Any) -> None:
    paged = module.sdpa_attention_paged_forward

    def paged_or_plain(*arguments: Any, **options: Any) -> Any:
        # Older releases refuse a pass without their cache, by which offbeat scores.
        if options.get("cache") is not None:
            return paged(*arguments, **options)
        plain = importlib.import_module("transformers.integrations.sdpa_attention")
        return plain.sdpa_attention_forward(*arguments, **options)

    module.sdpa_attention_paged_forward = paged_or_plain


COMPLETIONS: dict[str, Callable[[Any], None]] = {
    "torch.nn.attention.varlen": _complete_varlen,
    "transformers.generation.configuration_utils": _complete_batching_config,
    "transformers.integrations.sdpa_paged": _complete_paged_attention,
    "vllm.entrypoints": _complete_entrypoints,
    "vllm.outputs": _complete_outputs,
    "vllm.utils.nccl": _complete_nccl,
    "vllm.v1.engine.llm_engine": _complete_llm_engine,
    "vllm.v1.engine.output_processor": _complete_output_processor,
    "vllm.v1.worker.lora_model_runner_mixin": _complete_runner,
}
"""The function that completes each module, by the module's name."""


class _Completer(importlib.abc.MetaPathFinder):
    """Finds the modules of `COMPLETIONS` where they are, and completes them after their import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        complete = COMPLETIONS.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if complete else None
        if complete is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_complete(module: ModuleType) -> None:
            run(module)
            complete(module)

        spec.loader.exec_module = run_and_complete
        return spec


def install() -> None:
    """Complete modules that this process imports from now on."""
    sys.meta_path.insert(0, _Completer())
