"""Completions that noise alone clips at lag 0, by their length: with one band per run, and with one for each completion.

    python -m tests.benchmarks.clip_by_length progression
    python -m tests.benchmarks.clip_by_length MODEL_FOLDER        # a chat model

The engine is the model with its weights rounded to bfloat16, the learner the model itself; both compute in float32. Tokens are
sampled from the engine at temperature 1. Each completion is cut into stretches of n tokens, which stand for completions of that
length. For each n the table has the share of stretches below the band, which clips them where A < 0, and above it, which clips
them where A > 0. `calibrated` bands are of the noise of every other group, judged on the groups between them.
"""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from docs.study.sampler import ExactSampler
from docs.study.tasks import LENGTH, TASKS
from offbeat.common.settings.completion import engine_band
from offbeat.deploy.local.quickstart.prepared import ensure, prepared_folder
from offbeat.learner.calibration.noise_floor import Differences, fit
from offbeat.learner.objectives.bands import USUAL_NOISE, ClipBand
from tests.benchmarks.measuring import print_table

STRETCHES = (4, 8, 16, 32, 64)
WORDS = ("rain", "a loom", "gravity", "a lens", "rust", "a tide", "bread", "a comet", "glass", "an echo")
CAP = 1024
"""`rollout.max_new_tokens` of the run whose band is judged, for a chat model."""
GENERATED, NUM_EACH, NUM_PROMPTS = 64, 2, 100


class Source(NamedTuple):
    """A model and its prompts."""

    folder: Path
    prompts: list[NDArray[np.int32]]
    max_new_tokens: int
    cap: int


def main(name: str) -> None:
    """Sample, score and print the table."""
    source = _progression() if name == "progression" else _chat(Path(name))
    differences = _measure(source)
    print(f"{len(differences)} completions, {sum(map(len, differences))} tokens, d std {np.concatenate(differences).std():.3g}")
    bands = {
        f"run of {source.cap}": ClipBand(*engine_band(source.cap), is_sequence_ratio=True),
        "own length": ClipBand(0.05, 0.05, is_sequence_ratio=True, by_length=USUAL_NOISE),
    }
    whole = _stretches(differences, 1)._replace(lengths=np.array([len(one) for one in differences]))
    whole = whole._replace(groups=np.arange(len(differences)) // NUM_EACH)
    floors = [fit(whole.take(whole.groups % 2 == half)).of_length for half in (0, 1)]
    rows: list[list[str]] = []
    for length in STRETCHES:
        cut = _stretches(differences, length)
        shares = [cut.beyond(band) for band in bands.values()]
        halves = [
            cut.take(cut.groups % 2 == half).beyond(ClipBand(0.0, 0.0, True, by_length=floors[1 - half])) for half in (0, 1)
        ]
        shares.append((np.concatenate([half[0] for half in halves]), np.concatenate([half[1] for half in halves])))
        rows.append(
            [f"{length}", f"{len(cut.lengths)}", *(f"{below.mean():.1%}, {above.mean():.1%}" for below, above in shares)]
        )
    header = ("tokens", "stretches", *(f"{band}: below, above" for band in (*bands, "calibrated")))
    print_table("Beyond the band at lag 0, for noise alone", header, rows)


@torch.inference_mode()
def _measure(source: Source) -> list[NDArray[np.float64]]:
    """Return `log learner - log engine` of the tokens of each completion."""
    learner = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as rounded:
        AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.bfloat16).save_pretrained(rounded)
        AutoTokenizer.from_pretrained(source.folder).save_pretrained(rounded)
        sampled = ExactSampler(rounded).sample(
            source.prompts,
            num_each=NUM_EACH,
            max_new_tokens=source.max_new_tokens,
            generator=torch.Generator().manual_seed(0),
        )
    return [
        _log_probs(learner, source.prompts[index // NUM_EACH], one.token_ids) - one.behavior_logprobs
        for index, one in enumerate(sampled)
    ]


def _stretches(differences: list[NDArray[np.float64]], length: int) -> Differences:
    """Return the completions, cut into stretches of `length` tokens; the rest of each is left out."""
    whole = [one[: len(one) // length * length] for one in differences]
    counts = [len(one) // length for one in whole]
    groups = np.repeat(np.arange(len(whole)) // NUM_EACH, counts)
    tokens = np.concatenate(whole)
    return Differences(np.full(len(groups), length), tokens, np.ones(len(tokens)), groups)


def _log_probs(model: PreTrainedModel, prompt: NDArray[np.int32], completion: NDArray[np.int32]) -> NDArray[np.float64]:
    token_ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
    logits = model(input_ids=token_ids, logits_to_keep=len(completion) + 1).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, token_ids[0, len(prompt) :, None])[:, 0].double().numpy()


def _progression() -> Source:
    task = TASKS["progression"]
    folder = prepared_folder(task.recipe)
    ensure(folder, task.recipe)
    train, _ = task.prompts()
    return Source(folder / "model", [prompt.token_ids for prompt in train[:NUM_PROMPTS]], LENGTH, LENGTH)


def _chat(folder: Path) -> Source:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts: list[NDArray[np.int32]] = []
    for word in WORDS:
        asked = [{"role": "user", "content": f"Explain in a few sentences what {word} is."}]
        text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        prompts.append(np.array(tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32))
    return Source(folder, prompts, GENERATED, CAP)


if __name__ == "__main__":
    main(sys.argv[1])
