"""Families of models: those whose layers attend and do nothing else along a sequence, and how the others are run."""

from torch import nn
from transformers import PreTrainedModel

from offbeat.common.models.folders import config_obstacle


def mixing_obstacle(model: PreTrainedModel) -> str | None:
    """Return why sequences of the model can neither be packed nor have paged caches; None for plain attention.

    Looks at its config and modules, without a pass: one that raises half-way would leave weights gathered under ZeRO-3.
    """
    obstacle = config_obstacle(model.config.get_text_config().to_dict())
    if obstacle is not None:
        return obstacle
    if any(isinstance(module, nn.Conv1d) for module in backbone(model).modules()):
        return "it has convolutions along the sequence"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "its attention has sinks"
    return None


def plain_attention(model: PreTrainedModel) -> str:
    """Return the name of an attention of transformers that computes the model as it is."""
    # torch's attention leaves soft-capping out without a word.
    is_capped = model.config.get_text_config().to_dict().get("attn_logit_softcapping") is not None
    return "sdpa" if model._supports_sdpa and not is_capped else "eager"


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Make the text's layers use this attention. A vision tower, which sees whole images, keeps torch's."""
    parts = model.config.sub_configs
    model.set_attn_implementation({part: name if part == "text_config" else "sdpa" for part in parts} if parts else name)


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the model without its output layer."""
    # Llama 4's text model has another prefix than it says, and is then its own base.
    return model.base_model if model.base_model is not model else model.get_submodule("model")
