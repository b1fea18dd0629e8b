"""Tiny random models in the Hugging Face layout, for tests, and for machines that cannot reach the Hugging Face Hub."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

Architecture = Literal["qwen3", "qwen3_moe", "qwen3_5"]
"""transformers' name of a tiny model's family."""
HIDDEN_SIZE = 128
NUM_LAYERS = 2
NUM_HEADS = 4

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Qwen's tokens around an image, of an image, and of a video."""
PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(
    folder: Path,
    *,
    alphabet: Sequence[str],
    chat_template: str | None = None,
    architecture: Architecture = "qwen3",
    tie_embeddings: bool = True,
    seed: int = 0,
) -> None:
    """Write a random float32 model of about 0.3 M parameters whose tokens are the characters, or the texts, of `alphabet`.

    A Qwen3-MoE has four experts, two of them active; a Qwen3.5 has one layer of linear attention and one of full attention. The
    tokenizer adds no special tokens.
    """
    tokenizer = _tokenizer_of(alphabet)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    _save_random_model(folder, tokenizer, architecture=architecture, tie_embeddings=tie_embeddings, max_length=512, seed=seed)


def make_tiny_bpe_model(folder: Path, texts: Iterable[str], *, vocab_size: int = 1024, seed: int = 0) -> None:
    """Write a random float32 Qwen3 with a chat template and a byte-level BPE tokenizer trained on `texts`.

    Any text can be encoded. `vocab_size` (at least 259) bounds the number of tokens.
    """
    tokenizer = _bpe_tokenizer(texts, vocab_size)
    _save_random_model(folder, tokenizer, architecture="qwen3", tie_embeddings=True, max_length=2048, seed=seed)


def make_tiny_vision_model(
    folder: Path, *, alphabet: str, kind: Literal["qwen2_5_vl", "qwen3_vl", "qwen3_5"] = "qwen2_5_vl", seed: int = 0
) -> None:
    """Write a random float32 model of about 0.6 M parameters that takes images, with tokens as `make_tiny_model`.

    A token of an image is a square of 28 pixels; images of more than 16 tokens are made smaller.
    """
    # Imported here: only this model has a processor.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer_of(alphabet)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})  # pyright: ignore[reportArgumentType]
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, VISION_TOKENS)
    text = _text_shape(tokenizer, max_length=512) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 6, 6],
            **({} if kind == "qwen2_5_vl" else {"mrope_interleaved": True}),
        }
    }
    if kind == "qwen3_5":
        # vLLM reads the latter here alone.
        text |= _linear_layers(HIDDEN_SIZE // 2) | {"tie_word_embeddings": True}
        text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": HIDDEN_SIZE}
    vision |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    else:
        vision |= {"num_position_embeddings": 64}
    if kind == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0]}
    settings = {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(kind, **settings)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}
    Qwen2VLImageProcessorPil(size=size, patch_size=14, merge_size=2).save_pretrained(folder)


def _tokenizer_of(alphabet: Sequence[str]) -> transformers.PreTrainedTokenizerFast:
    texts = list(dict.fromkeys(alphabet))
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNKNOWN, *texts])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    words = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    pattern = "|".join([*map(re.escape, words), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def _bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with Qwen's special tokens and chat template, so that a run that works with it works with Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _linear_layers(head_size: int) -> dict[str, Any]:
    """Return the fields of the config of a language model whose layers have linear and full attention in turn."""
    return {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": NUM_HEADS // 2,
        "linear_num_value_heads": NUM_HEADS,
        "linear_key_head_dim": head_size,
        "linear_value_head_dim": head_size,
    }


def _text_shape(tokenizer: transformers.PreTrainedTokenizerFast, *, max_length: int) -> dict[str, Any]:
    """Return the fields of the config of a tiny language model."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS // 2,
        "head_dim": HIDDEN_SIZE // NUM_HEADS,
        "max_position_embeddings": max_length,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _save_random_model(
    folder: Path,
    tokenizer: transformers.PreTrainedTokenizerFast,
    *,
    architecture: Architecture,
    tie_embeddings: bool,
    max_length: int,
    seed: int,
) -> None:
    shape: dict[str, Any] = _text_shape(tokenizer, max_length=max_length) | {
        "tie_word_embeddings": tie_embeddings,
        "dtype": "float32",
    }
    # The caller's random state is unchanged: tests draw from it.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if architecture == "qwen3_moe":
            shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN_SIZE}
            model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape))
        elif architecture == "qwen3_5":
            shape |= _linear_layers(HIDDEN_SIZE // NUM_HEADS)
            model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**shape))
        else:
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
