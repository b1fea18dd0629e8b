"""The actor's engine on transformers: slower than vLLM, and nothing more to install.

Models of plain attention run in continuous batches on a paged cache (`PagedBatches`), all others on the caches that they make
themselves (`OwnCaches`).
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import GENERATION_CONFIG_NAME

from offbeat.actor.engines.batches import FinishedCompletion, OwnCaches, PagedBatches
from offbeat.actor.engines.engine import CacheUse, Completion, EngineSettings, Score, check_prompt_length, spoil
from offbeat.common.models.families import mixing_obstacle, plain_attention, set_attention
from offbeat.common.models.folders import has_weight_files
from offbeat.common.models.images import ImagePatches
from offbeat.common.models.routing import record_routing
from offbeat.common.processes.process_table import processor_name
from offbeat.common.weights.flat import WeightBuffer, tensor_dtype
from offbeat.common.weights.nccl_group import gpu_uuid
from offbeat.protocols.message_parts import EngineInfo
from offbeat.protocols.messages import Sampling
from offbeat.protocols.payload import Segment

GREEDY_TEMPERATURE = 1e-6
"""Replaces temperature 0: an engine either samples all its completions or none."""


class TransformersEngine:
    """An `Engine` on transformers."""

    cache_use = CacheUse(0, 0)

    def __init__(self, model_path: str, settings: EngineSettings) -> None:
        """Load the model; its weights count as version -1. The options are of `ContinuousBatchingConfig`.

        Where experts are recorded, no CUDA graphs are used. A model without plain attention takes no options.

        From a folder without weights the model is made of its config, and first samples after `load_weights`.
        """
        transformers.utils.logging.disable_progress_bar()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        has_files = has_weight_files(model_path)
        make = _load_model if has_files else _make_model
        self._model: PreTrainedModel = make(model_path, tensor_dtype(settings.dtype))
        nn.Module.to(self._model, device)
        self._eos_token_ids = _eos_token_ids(self._model, model_path)
        make_batches = PagedBatches if _choose_attention(self._model) else OwnCaches
        self._batches = make_batches(self._model, settings, self._eos_token_ids)
        if not has_files:
            spoil(self._model)
        self.info = EngineInfo(
            name="transformers",
            version=transformers.__version__,
            dtype=settings.dtype,
            device=device.type,
            max_model_len=settings.max_model_len,
            hashes=settings.hashes,
            gpu=gpu_uuid(0) if device.type == "cuda" else None,
            has_weight_files=has_files,
            processor=processor_name(device.type),
        )
        self.policy_version: int | None = None
        self._segments: dict[str, list[Segment]] = {}
        """Segments of every unfinished completion, by request id."""
        self._num_ended_tokens = 0
        self.num_loads = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._segments)

    @property
    def num_generated_tokens(self) -> int:
        return self._num_ended_tokens + sum(self._batches.num_tokens().values())

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
        check_prompt_length(num_prompt_tokens, self.info.max_model_len)
        assert self.policy_version is not None, "weights come before prompts"
        for request_id in request_ids:
            self._segments[request_id] = [Segment(self.policy_version, 0)]
        self._batches.add(
            request_ids,
            prompt_token_ids,
            max_new_tokens=min(sampling.max_new_tokens, self.info.max_model_len - num_prompt_tokens),
            temperature=float(sampling.temperature or GREEDY_TEMPERATURE),
        )

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        return [self._completion(sampled) for sampled in self._batches.step()]

    def abort(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._segments.pop(request_id, None)
        self._num_ended_tokens += self._batches.remove(request_ids)

    def load_weights(self, weights: WeightBuffer, policy_version: int, *, recompute_kv: bool) -> None:
        self._copy_weights(dict(weights.views()))
        self.policy_version = policy_version
        self.num_loads += 1
        for request_id, num_tokens in self._batches.num_tokens().items():
            _begin_segment(self._segments[request_id], Segment(policy_version, num_tokens))
        self._batches.restart(keeps_begun=not recompute_kv)

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

    def _completion(self, sampled: FinishedCompletion) -> Completion:
        self._num_ended_tokens += len(sampled.token_ids)
        return Completion(
            request_id=sampled.request_id,
            token_ids=np.array(sampled.token_ids, np.int32),
            behavior_logprobs=np.array(sampled.logprobs, np.float32),
            finish_reason="stop" if sampled.token_ids[-1] in self._eos_token_ids else "length",
            segments=tuple(self._segments.pop(sampled.request_id)),
            experts=sampled.experts,
        )

    @torch.no_grad()
    def _copy_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        parameters = dict(self._model.named_parameters())
        if parameters.keys() != weights.keys():
            difference = sorted(parameters.keys() ^ weights.keys())
            raise ValueError(f"not the parameters of this model; {len(difference)} differ, first {difference[0]}")
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def _load_model(folder: str, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _make_model(folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a folder without weights, as `_load_model` would return it but for them."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if Path(folder, GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _choose_attention(model: PreTrainedModel) -> bool:
    """Give the model its attention; return whether it can have a paged cache."""
    name = plain_attention(model)
    set_attention(model, name)
    # With latent attention keys and values are of two sizes, and transformers' cache has one.
    is_latent = "kv_lora_rank" in model.config.to_dict()
    return name == "sdpa" and not is_latent and mixing_obstacle(model) is None and _hands_on_keywords(model)


@torch.no_grad()
def _hands_on_keywords(model: PreTrainedModel) -> bool:
    """Return whether each layer hands keywords that it does not know on to its attention: a paged cache comes by them.

    Runs the model once.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    reached = set[nn.Module]()

    def look(module: nn.Module, _: object, keywords: Mapping[str, object]) -> None:
        if "trial" in keywords:
            reached.add(module)

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            for part in layer.children():
                hooks.callback(part.register_forward_pre_hook(look, with_kwargs=True).remove)
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False, trial=True)
    return all(reached.intersection(layer.children()) for layer in layers)


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
