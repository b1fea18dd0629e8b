"""The model folder that `model.path` names, and the hashes by which two services know that they have the same model."""

import hashlib
import json
import logging
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from offbeat.common.errors import SettingError, one_line
from offbeat.protocols.message_parts import ModelHashes

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
PROCESSOR_FILE = "preprocessor_config.json"
"""The settings of a vision-language model's image processor; other models have no such file."""
WHOLE_PROCESSOR_FILE = "processor_config.json"
"""The settings of its processor of everything, in which transformers 5 puts those of its image processor too."""
VOCABULARY_FILES = (
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
    *("spiece.model", "tekken.json"),
)
"""The files that a tokenizer is made from where there is no tokenizer.json."""
SMALL_FILES = (
    *("config.json", GENERATION_FILE, PROCESSOR_FILE, WHOLE_PROCESSOR_FILE, "video_preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", *VOCABULARY_FILES),
)
"""Every file of a model folder, but weights, that an engine or a tokenizer reads."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
HUB_S = 4.0
"""Seconds within which the model hub must answer."""
BUFFER_BYTES = 1 << 20
"""Bytes of a weight file that are read at once."""


def resolve_model(path: str, setting: str = "model.path") -> Path:
    """Return the local folder of a model: itself, or the model hub's snapshot of that name, downloaded if need be.

    Raises `SettingError` when there is neither.
    """
    if Path(path).is_dir():
        return Path(path)
    obstacle = hub_obstacle(path)
    if obstacle is not None:
        raise SettingError(setting, path, *obstacle)
    # Takes 0.3 s to import, and is only needed for hub names.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, ignore_patterns=["*.pth", "*.bin", "*.gguf", "original/*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        problem = f"it is no folder here, and the model hub did not serve it ({str(error).splitlines()[0]})"
        cure = "Give a model folder, or a hub name on a machine that reaches the hub."
        raise SettingError(setting, path, problem, cure) from error


def find_config(path: str, *, asks_hub: bool = True) -> bytes | None:
    """Return the config.json of `model.path`, of a hub name from its cache or the hub itself; None if it is unavailable."""
    if Path(path).exists():
        return _read(Path(path) / "config.json") or None
    # Takes 0.3 s to import, and is only needed for hub names.
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = try_to_load_from_cache(path, "config.json")
        if isinstance(cached, str):
            return _read(Path(cached))
        if not asks_hub or hub_obstacle(path) is not None:
            return None
        return _read(Path(hf_hub_download(path, "config.json")))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None


@cache
def hub_obstacle(name: str) -> tuple[str, str] | None:
    """Return why the model hub cannot serve this model, and the cure; None for a model in the cache, and when the hub has it.

    The hub's own functions repeat a failed request for half a minute. This asks once, for `HUB_S` at most.
    """
    import httpx2
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    answers: list[tuple[str, str] | None] = []

    def ask() -> None:
        try:
            if not isinstance(try_to_load_from_cache(name, "config.json"), str):
                logger.info("looking for the model %s at the model hub, for at most %.0f s", name, HUB_S)
                HfApi(constants.ENDPOINT).model_info(name, timeout=HUB_S)
            answers.append(None)
        except HFValidationError:
            answers.append(("it is no folder here, and no name of a model hub", "Correct the path or the name."))
        except RepositoryNotFoundError:
            cure = "Correct the path or the name; for a private model, set HF_TOKEN."
            answers.append(("it is no folder here, and the model hub has no such model", cure))
        except OfflineModeIsEnabled:
            cure = "Give a model folder, or unset HF_HUB_OFFLINE."
            answers.append(("it is no folder here, it is not in the hub's cache, and HF_HUB_OFFLINE is set", cure))
        except HfHubHTTPError:
            # A hub that answers with an error may serve it at the next request.
            answers.append(None)
        except (httpx2.HTTPError, OSError, ValueError, KeyError) as error:
            answers.append(_unreachable(one_line(error)))

    # A thread, since the name of the hub is looked up without a time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_S)
    return answers[0] if answers else _unreachable(f"no answer within {HUB_S:.0f} s")


def _unreachable(reason: str) -> tuple[str, str]:
    return (
        f"it is no folder here, and the model hub cannot be reached ({reason})",
        "Give a model folder, or a hub name on a machine that reaches the hub.",
    )


def has_weight_files(path: str) -> bool:
    """Return whether a model folder has weights; True for a hub name, which an engine loads itself."""
    return not Path(path).is_dir() or any(any(Path(path).glob(pattern)) for pattern in (*WEIGHT_FILES, "*.gguf"))


def small_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the `SMALL_FILES` that a model folder has, by name."""
    return {name: (folder / name).read_bytes() for name in SMALL_FILES if (folder / name).is_file()}


def load_tokenizer(folder: Path) -> Any:
    """Return a model folder's tokenizer, a `PreTrainedTokenizerBase`; raise `SettingError` where it cannot be loaded."""
    # Takes seconds to import.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    # The tokenizers library raises `Exception` itself for a file that it cannot read.
    except Exception as error:
        problem = f"its tokenizer cannot be loaded ({' '.join(str(error).split())[:300]})"
        raise SettingError("model.path", str(folder), problem, "Save it again: tokenizer.save_pretrained(FOLDER).") from error


def make_without_weights(folder: Path, *, has_images: bool) -> Any:
    """Return a folder's model, a `PreTrainedModel`, with parameters that have no memory; without images its language model."""
    # Takes seconds to import.
    import torch
    import transformers

    kind = transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(transformers.AutoConfig.from_pretrained(folder))


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that the model goes on from, after those that its tokenizer puts before every text."""
    token_ids = list(tokenizer.encode(text))
    # Some put the end of a turn behind it, as they were told to for fine-tuning.
    if len(token_ids) > 1 and token_ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        token_ids.pop()
    return token_ids


def load_vocabulary_size(folder: Path, tokenizer: Any) -> int:
    """Return the number of token ids that a model knows; raise `SettingError` where the tokenizer has more of them."""
    from transformers import AutoConfig

    try:
        size = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    # transformers raises whatever a config of another kind of model makes it raise.
    except Exception as error:
        problem = f"its config cannot be loaded ({' '.join(str(error).split())[:300]})"
        cure = "Give a model of a type that this version of transformers knows, or copy its config.json again."
        raise SettingError("model.path", str(folder), problem, cure) from error
    if (obstacle := vocabulary_obstacle(tokenizer, size)) is not None:
        raise SettingError("model.path", str(folder), *obstacle)
    return size


def vocabulary_obstacle(tokenizer: Any, size: int) -> tuple[str, str] | None:
    """Return why a model of `size` token ids cannot have this tokenizer, and the cure; None where it can."""
    beyond = tokenizer.convert_ids_to_tokens(list(range(size, len(tokenizer))))
    # Gemma 3 1B reads text alone, and has the tokenizer of the larger ones, whose place for an image is one token more.
    if not beyond or beyond == [tokenizer.special_tokens_map.get("image_token")]:
        return None
    problem = f"the tokenizer has {len(tokenizer)} tokens, and the model's vocabulary {size}"
    return problem, "Use the tokenizer that the model was made with."


def reference_obstacle(tokenizer: Any, folder: Path) -> tuple[str, str] | None:
    """Return why a model cannot be the KL's reference of one with this tokenizer, and the cure; None where it can.

    Both see the same token ids. Tokens that the reference lacks are no obstacle while its vocabulary has their ids.
    """
    fields = json.loads(_read(folder / "config.json") or b"{}")
    size = (fields.get("text_config") or fields).get("vocab_size")
    cure = "Give a model with the same vocabulary."
    if size is not None and (obstacle := vocabulary_obstacle(tokenizer, size)) is not None:
        return obstacle[0], cure
    try:
        theirs = load_tokenizer(folder).get_vocab()
    except SettingError:
        # A reference needs no tokenizer.
        return None
    others = sorted(token for token, token_id in tokenizer.get_vocab().items() if theirs.get(token, token_id) != token_id)
    return (f"{len(others)} tokens of model.path are others there, such as {others[0]!r}", cure) if others else None


def hash_model(folder: Path) -> ModelHashes:
    """Return the hashes of a model folder's config, tokenizer and chat template, 16 hexadecimal digits each."""
    # Another processor would make other patches of the same image.
    whole_processor = _read(folder / WHOLE_PROCESSOR_FILE)
    config = _read(folder / "config.json") + _read(folder / PROCESSOR_FILE)
    config += whole_processor if b'"image_processor"' in whole_processor else b""
    tokenizer_config = json.loads(_read(folder / "tokenizer_config.json") or b"{}")
    # Newer models have the chat template in a separate file, older ones in the tokenizer's config.
    template = _read(folder / "chat_template.jinja").decode() or str(tokenizer_config.pop("chat_template", ""))
    tokenizer_config.pop("chat_template", None)
    vocabulary = _read(folder / "tokenizer.json") or b"".join(_read(folder / name) for name in VOCABULARY_FILES)
    tokenizer = vocabulary + json.dumps(tokenizer_config, sort_keys=True).encode()
    return ModelHashes(config=_hash(config), tokenizer=_hash(tokenizer), chat_template=_hash(template.encode()))


def hash_weights(folder: Path) -> str:
    """Return a hash of the names, sizes and contents of a model folder's weight files, 32 hexadecimal digits.

    Costs 0.1 s of CPU per GB. The learner loads the files next, and finds them in the page cache.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(BUFFER_BYTES))
    for path in sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern)):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb", buffering=0) as file:
            while num_bytes := file.readinto(buffer):
                digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def _read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


ATTENDING = {"full_attention", "sliding_attention"}
"""Types of layers, in a config's `layer_types`, in which a token meets others only by attending to them."""


def config_obstacle(fields: Mapping[str, Any]) -> str | None:
    """Return why a model cannot be packed, as far as the fields of its text's config say; None where they say nothing."""
    others = set(fields.get("layer_types") or ()) - ATTENDING
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    if fields.get("attn_logit_softcapping") is not None:
        return "its attention has soft-capping"
    return None
