"""Tiny random models in the Hugging Face layout, for tests, and for machines that cannot reach the Hugging Face Hub."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

HIDDEN_SIZE = 128
NUM_LAYERS = 2
NUM_HEADS = 4

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
    moe: bool = False,
    tie_embeddings: bool = True,
    seed: int = 0,
) -> None:
    """Write a random float32 Qwen3 of about 0.3 M parameters whose tokens are the characters, or the texts, of `alphabet`.

    With `moe` the model is a Qwen3-MoE with four experts, two of them active. The tokenizer adds no special tokens.
    """
    tokenizer = _tokenizer_of(alphabet)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    _save_random_model(folder, tokenizer, moe=moe, tie_embeddings=tie_embeddings, max_length=512, seed=seed)


def make_tiny_bpe_model(
    folder: Path, texts: Iterable[str], *, vocab_size: int = 1024, max_length: int = 2048, seed: int = 0
) -> None:
    """Write a random float32 Qwen3 with a chat template and a byte-level BPE tokenizer trained on `texts`.

    Any text can be encoded. `vocab_size` (at least 259) bounds the number of tokens; `max_length` is in tokens.
    """
    _save_random_model(
        folder, _bpe_tokenizer(texts, vocab_size), moe=False, tie_embeddings=True, max_length=max_length, seed=seed
    )


def _tokenizer_of(alphabet: Sequence[str]) -> PreTrainedTokenizerFast:
    texts = list(dict.fromkeys(alphabet))
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNKNOWN, *texts])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    words = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    pattern = "|".join([*map(re.escape, words), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def _bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _save_random_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    moe: bool,
    tie_embeddings: bool,
    max_length: int,
    seed: int,
) -> None:
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS // 2,
        "head_dim": HIDDEN_SIZE // NUM_HEADS,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": tie_embeddings,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
    }
    # The caller's random state is unchanged: tests draw from it.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if moe:
            shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN_SIZE}
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
