"""Teach a model the form of an environment's answers, by imitation of right ones.

    python examples/verifiers/warm_start.py CONFIG FOLDER [TASKS]

The rewards of reverse-text and alphabet-sort are 0 without their tags, and a model that never writes them learns nothing.
prime-rl's example begins with a model that has imitated right answers too. CONFIG is that of the run, which says where model
and environment are; FOLDER gets the taught model, for `model.path`. It learns from the first TASKS (300) tasks of training.
"""

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat.common.settings.config import environment_of
from offbeat.common.settings.loading import load
from offbeat.common.user_code.external_environment import environment_rows
from offbeat.deploy.local.quickstart.prepared import expand

BATCH_SIZE = 8
LEARNING_RATE = 5e-5
IGNORED = -100
"""The label of tokens that are not the model's."""


def right_turns(row: dict[str, Any]) -> Iterator[tuple[list[dict[str, str]], str]]:
    """Yield the messages before each turn of a task, and the turn that earns the whole reward."""
    task = row["task"]
    if "answer" in task:
        yield row["prompt"], f"<reversed_text>{task['answer']}</reversed_text>"
        return
    messages: list[dict[str, str]] = []
    for question, names in zip(task["info"]["user_turns"], task["info"]["ground_truths"], strict=True):
        tag = "combined_alphabetical_sorted" if messages else "alphabetical_sorted"
        turn = "\n".join((f"<{tag}>", *names, f"</{tag}>"))
        messages = [*messages, {"role": "user", "content": question}]
        yield messages, turn
        messages = [*messages, {"role": "assistant", "content": turn}]


def encoded(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return a task's conversation as token ids, and as labels: the turns of the model, everything else ignored."""
    tokens: list[int] = []
    labels: list[int] = []
    for messages, turn in right_turns(row):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if prompt[: len(tokens)] != tokens:
            raise SystemExit("this chat template changes earlier turns, so labels would stand at other tokens than the model's")
        answer = [*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id]
        labels += [IGNORED] * (len(prompt) - len(tokens)) + answer
        tokens = prompt + answer
    return tokens, labels


def main(config_file: str, folder: str, num_tasks: str = "300") -> None:
    config = expand(load(Path(config_file)))
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    rows = environment_rows(environment_of(config), config.data.train_data, "data.train_data")
    examples = [encoded(tokenizer, row) for row in itertools.islice(rows, int(num_tasks))]
    random.Random(0).shuffle(examples)

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for first in range(0, len(examples), BATCH_SIZE):
        batch = examples[first : first + BATCH_SIZE]
        shape = len(batch), max(len(tokens) for tokens, _ in batch)
        input_ids = torch.full(shape, tokenizer.eos_token_id)
        targets = torch.full(shape, IGNORED)
        mask = torch.zeros(shape, dtype=torch.long)
        for index, (tokens, labels) in enumerate(batch):
            input_ids[index, : len(tokens)] = torch.tensor(tokens)
            targets[index, : len(tokens)] = torch.tensor(labels)
            mask[index, : len(tokens)] = 1
        loss = model(input_ids=input_ids, attention_mask=mask, labels=targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{first + len(batch)} of {len(examples)} tasks, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
