"""Prompts with images for vLLM: patches that are made already, so that engine and learner read the same tokens and pixels.

vLLM's classes of Qwen's newer language models import those for images, and with them torchvision, which a CPU may lack.
"""

import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from offbeat.common.models.images import ImagePatches, ImageReader
from offbeat.protocols.payload import MAX_IMAGES

OPTIONS: dict[str, Any] = {
    "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0},
    # The patches are normalized already, as the learner's are.
    "mm_device_do_normalize": False,
    # There is nothing to cache: vLLM gets patches, not files.
    "mm_processor_cache_gb": 0,
}
"""Options of an engine whose prompts have images."""


def image_prompt(token_ids: list[int], images: Sequence[ImagePatches], reader: ImageReader, *, salt: str) -> MultiModalInput:
    """Return a prompt with images for vLLM. `token_ids` has each image's tokens, as `ImageReader.check_prompt` wants them.

    With another `salt` nothing that vLLM keeps of the prompt is used: neither keys nor outputs of the vision tower.
    """
    grids = torch.tensor([(1, image.rows, image.columns) for image in images])
    features = {"pixel_values": torch.cat([torch.from_numpy(image.values) for image in images]), "image_grid_thw": grids}
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    # The names that vLLM keeps the vision tower's outputs under.
    names = [f"{image.hash:016x}-{salt}" for image in images]
    return mm_input(
        token_ids,
        MultiModalKwargsItems.from_hf_inputs(features, fields),  # pyright: ignore[reportArgumentType], takes any mapping
        {"image": names},
        {"image": _placeholders(token_ids, images, reader)},
        cache_salt=salt,
    )


def _placeholders(token_ids: list[int], images: Sequence[ImagePatches], reader: ImageReader) -> list[PlaceholderRange]:
    """Return each image's place in the prompt."""
    places: list[PlaceholderRange] = []
    end = 0
    for image in images:
        start = token_ids.index(reader.image_token_id, end)
        end = start + reader.num_tokens(image)
        places.append(PlaceholderRange(start, end - start))
    return places


def import_classes(names: Iterable[str]) -> None:
    """Import classes of a model in this process, so that vLLM does not start another one to inspect them.

    The other process takes seconds, and runs without the changes of `prepare_environment`.
    """
    for name in names:
        if name not in ModelRegistry.models:
            continue
        model = ModelRegistry.models[name]
        try:
            found = model.load_model_cls()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "torchvision":
                raise
            _replace_image_module()
            found = model.load_model_cls()
        ModelRegistry.register_model(name, found)


def _replace_image_module() -> None:
    """Make vLLM's classes of Qwen's vision-language models importable where torchvision is not.

    They import one function from a module of transformers that needs torchvision; its twin for Pillow has the same function.
    """
    import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl as twin

    sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", twin)


def engine_options(reader: ImageReader) -> dict[str, Any]:
    """Return the options of an engine whose prompts have images; do without vLLM's own processors where they cannot be made.

    vLLM makes transformers' processor of videos too, which needs torchvision.
    """
    if _is_torchvision_there():
        return dict(OPTIONS)
    for architecture in reader.architectures:
        model = ModelRegistry.models[architecture].load_model_cls()
        info = type("_Sized", (_ImagesOnly,), {"largest_image": reader.largest_image})
        # Overwritten without vLLM's warning that it is.
        del model._processor_factory  # pyright: ignore[reportAttributeAccessIssue]
        MULTIMODAL_REGISTRY.register_processor(_NoProcessor, info=info, dummy_inputs=_NoDummies)(model)  # pyright: ignore
    # Profiling would need the processor.
    return {**OPTIONS, "skip_mm_profiling": True}


def _is_torchvision_there() -> bool:
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"] is not None
    return importlib.util.find_spec("torchvision") is not None


class _ImagesOnly(BaseProcessingInfo):
    largest_image = 0

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": min(self.largest_image, seq_len)}

    def get_data_parser(self) -> Any:
        return None


class _NoDummies(BaseDummyInputsBuilder[_ImagesOnly]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        raise NotImplementedError

    def get_dummy_mm_data(self, *arguments: Any, **others: Any) -> Any:
        raise NotImplementedError


class _NoProcessor(BaseMultiModalProcessor[_ImagesOnly]):
    def _get_mm_fields_config(self, *arguments: Any, **others: Any) -> Any:
        raise NotImplementedError

    def _get_prompt_updates(self, *arguments: Any, **others: Any) -> Any:
        raise NotImplementedError
