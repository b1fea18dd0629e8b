"""A tiny model that nearly solves a task: random weights, then some seconds of supervised training."""

from collections.abc import Iterable, Sequence
from pathlib import Path

LEARNING_RATE = 2e-3
"""Peak, reached after twenty steps; then it falls linearly to 0."""


def warm_start(
    folder: Path,
    batches: Iterable[Sequence[tuple[Sequence[str], str]]],
    *,
    num_steps: int,
    alphabet: Sequence[str],
    chat_template: str | None,
    seed: int,
    moe: bool = False,
) -> None:
    """Train a random tiny model whose tokens are the texts of `alphabet`, with `moe` a mixture of experts, and save it.

    Args:
        folder: The model's.
        batches: `num_steps` batches of examples of one length, each with a mask: the model learns to write the tokens below
            an `x`, after those before. The token `$` is the end of a turn.
    """
    # Imported here: they take seconds, and only the first run on this machine needs them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from offbeat.deploy.local.quickstart.tiny_models import EOS, make_tiny_model

    transformers_logging.disable_progress_bar()
    make_tiny_model(folder, alphabet=alphabet, chat_template=chat_template, moe=moe, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1.0) * (1.0 - step / num_steps))
    # One thread sums in a fixed order, so the weights are reproducible; more threads are not faster at this size.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for batch in batches:
            named = ([EOS if token == "$" else token for token in tokens] for tokens, _ in batch)
            token_ids = torch.tensor([tokenizer.convert_tokens_to_ids(tokens) for tokens in named])
            mask = torch.tensor([[one == "x" for one in mask] for _, mask in batch])
            logits = model(token_ids[:, :-1]).logits
            torch.nn.functional.cross_entropy(logits[mask[:, 1:]], token_ids[:, 1:][mask[:, 1:]]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    finally:
        torch.set_num_threads(num_threads)
    model.save_pretrained(folder)
