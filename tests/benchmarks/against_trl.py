"""The quick start against TRL's GRPOTrainer: the same task, model, batch and learning rate, in turns on this machine.

    python -m tests.benchmarks.against_trl     # 6 minutes on two quiet cores; the first time it installs TRL for itself

TRL gets an environment of its own in the user's cache, which shares torch and transformers with this one. It runs with one and
with two threads, and the better of the two counts. Both train 100 steps of 32 groups of 8 completions with a sequence-level
ratio; the quick start evaluates, writes checkpoints and a report besides, and each command is measured whole.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from offbeat.common.records.rows import StepRow
from offbeat.deploy.local.quickstart.prepared import RECIPES, prepared_folder
from tests.benchmarks.measuring import NUM_ROUNDS, Cost, children_cpu_s, print_table, run_offbeat, spread

TRL = "1.16.0"
ACCELERATE = "1.15.0"
NUM_STEPS = 100
"""Of the quick start's config, as the next two."""
COMPLETIONS_PER_STEP = 256
LEARNING_RATE = 2e-4
TIMEOUT_S = 900.0

TRIAL = """
import json, sys, time
from offbeat.common.processes.environment import prepare_environment
prepare_environment()  # or a torchvision that torch cannot load stops transformers
import datasets, torch
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
folder, out, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(settings["threads"])
def reward(completions, answer, **_):
    return [float(completion.strip() == of_row.strip()) for completion, of_row in zip(completions, answer)]
config = GRPOConfig(
    output_dir=out, max_steps=settings["steps"], per_device_train_batch_size=settings["completions"], num_generations=8,
    max_completion_length=8, learning_rate=settings["learning_rate"], lr_scheduler_type="constant", beta=0.0,
    importance_sampling_level="sequence", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
    logging_steps=1, save_strategy="no", disable_tqdm=True, seed=settings["seed"],
)
trainer = GRPOTrainer(
    model=folder + "/model", reward_funcs=reward, args=config,
    train_dataset=datasets.Dataset.from_json(folder + "/train.jsonl"),
    processing_class=AutoTokenizer.from_pretrained(folder + "/model"),
)
started = time.monotonic()
trainer.train()
steps_s = time.monotonic() - started
last = [row["reward"] for row in trainer.state.log_history if "reward" in row][-10:]
trainer.save_model(out)
print("RESULT", json.dumps([steps_s / settings["steps"], sum(last) / len(last)]))
"""


class Trial(NamedTuple):
    """One run of one program."""

    cost: Cost
    """The cost of the whole command."""
    step_s: float
    """Seconds a step, generation included."""
    reward: float
    """Mean reward of the last ten steps, 0 to 1."""


def run_quickstart(seed: int) -> Trial:
    """Run `offbeat train` without a config."""
    run = run_offbeat(f"run.seed={seed}", timeout_s=TIMEOUT_S)
    steps = run.of_kind(StepRow)
    step_s = (steps[-1].time - steps[0].time) / (len(steps) - 1)
    return Trial(run.cost, step_s, sum(step.measured("reward/mean") for step in steps[-10:]) / 10)


def run_trl(python: Path, seed: int, num_threads: int) -> Trial:
    """Run GRPOTrainer with this many threads."""
    settings = {
        "threads": num_threads,
        "steps": NUM_STEPS,
        "completions": COMPLETIONS_PER_STEP,
        "learning_rate": LEARNING_RATE,
        "seed": seed,
    }
    started, cpu_before = time.monotonic(), children_cpu_s()
    with tempfile.TemporaryDirectory(prefix="offbeat-benchmark-") as out:
        command = [str(python), "-c", TRIAL, str(prepared_folder(RECIPES[0])), out, json.dumps(settings)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False)
    results = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    if ended.returncode or not results:
        sys.exit(f"TRL ended with status {ended.returncode}:\n{(ended.stdout + ended.stderr)[-4000:]}")
    step_s, reward = json.loads(results[0].removeprefix("RESULT "))
    return Trial(Cost(time.monotonic() - started, children_cpu_s() - cpu_before), step_s, reward)


def trl_python() -> Path:
    """Return the Python of an environment with TRL beside this one's packages; make it at the first call."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "offbeat" / f"trl-{TRL}-{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        packages = [f"trl=={TRL}", f"accelerate=={ACCELERATE}"]
        # Without their requirements, which would replace torch and transformers by others than offbeat's.
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *packages], check=True)
    # Each time: the checkout that made it may be gone.
    (own,) = folder.glob("lib/python*/site-packages")
    shared = importlib.metadata.distribution("torch").locate_file("")
    (own / "shared.pth").write_text(f"{shared}\n{Path(__file__).resolve().parents[2] / 'src'}\n")
    return python


def main() -> None:
    """Run all programs in turns, and print costs and ratios."""
    python = trl_python()
    variants: dict[str, Callable[[int], Trial]] = {
        "offbeat": run_quickstart,
        "TRL, 1 thread": lambda seed: run_trl(python, seed, 1),
        "TRL, 2 threads": lambda seed: run_trl(python, seed, 2),
    }
    run_quickstart(0)  # makes the model and the data, and compiles
    trials: dict[str, list[Trial]] = {name: [] for name in variants}
    for seed in range(NUM_ROUNDS):
        for name, run in variants.items():
            trials[name].append(run(seed))
            print(name, trials[name][-1], flush=True)
    peer = min(list(variants)[1:], key=lambda name: median(trial.cost.wall_s for trial in trials[name]))
    print_table(
        f"{NUM_STEPS} steps of {COMPLETIONS_PER_STEP} completions: median (min–max) of {NUM_ROUNDS} rounds",
        ["program", "samples/s in the steps", "whole command, s", "CPU s", "reward at the end"],
        [
            [
                name,
                spread([COMPLETIONS_PER_STEP / trial.step_s for trial in of_program], 0),
                spread([trial.cost.wall_s for trial in of_program], 1),
                spread([trial.cost.cpu_s for trial in of_program], 1),
                spread([trial.reward for trial in of_program]),
            ]
            for name, of_program in trials.items()
        ],
    )
    pairs = list(zip(trials["offbeat"], trials[peer], strict=True))
    print_table(
        f"offbeat against {peer}, round by round",
        ["steps, times as fast", "whole command, times as fast", "CPU s, times as many"],
        [
            [
                spread([theirs.step_s / ours.step_s for ours, theirs in pairs]),
                spread([theirs.cost.wall_s / ours.cost.wall_s for ours, theirs in pairs]),
                spread([ours.cost.cpu_s / theirs.cost.cpu_s for ours, theirs in pairs]),
            ]
        ],
    )


if __name__ == "__main__":
    main()
