"""Models that many tests share: made once a session, tiny, random, float32."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from offbeat.common.environment import BROKEN_VARIABLE, prepare_environment

# Before any test module imports transformers or vLLM.
prepare_environment()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Processes that tests start find out for themselves which packages are broken, as they do anywhere else.
os.environ.pop(BROKEN_VARIABLE, None)

# No time limits on single examples: on a busy machine they fail tests at random.
settings.register_profile("offbeat", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("offbeat")

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz+-=>"
"""The characters that `tiny_model` and its variants know."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a dense Qwen3 with tied embeddings and one token per character of `ALPHABET`."""
    return _make(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def tiny_untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_model`, with an output head of its own."""
    return _make(tmp_path_factory.mktemp("tiny_untied_model"), tie_embeddings=False)


@pytest.fixture(scope="session")
def tiny_moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_model`, with four experts in each layer."""
    return _make(tmp_path_factory.mktemp("tiny_moe_model"), moe=True)


@pytest.fixture(scope="session")
def tiny_bpe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a dense Qwen3 with a byte-level BPE tokenizer and a chat template."""
    from offbeat.deploy.quickstart.tiny_models import make_tiny_bpe_model

    folder = tmp_path_factory.mktemp("tiny_bpe_model")
    make_tiny_bpe_model(folder, ["What is 2 + 2?", "Natalia sold 48 clips in May. #### 72"], vocab_size=300)
    return folder


def _make(folder: Path, *, moe: bool = False, tie_embeddings: bool = True) -> Path:
    # Imported here: most tests need no model, and transformers takes seconds to import.
    from offbeat.deploy.quickstart.tiny_models import make_tiny_model

    make_tiny_model(folder, alphabet=ALPHABET, moe=moe, tie_embeddings=tie_embeddings)
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU are for machines that have one."""
    import torch

    if torch.cuda.is_available():
        return
    for_gpus = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if item not in for_gpus]
    config.hook.pytest_deselected(items=for_gpus)
