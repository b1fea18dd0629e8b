"""SmolLM2-135M-Instruct learns sums under offbeat and under TRL's GRPOTrainer, in turns on this machine, to a held-out 0.9.

    python -m tests.benchmarks.sums_against_trl                           # hours on two quiet cores
    python -m tests.benchmarks.sums_against_trl --rounds 1 --steps 2      # a rehearsal

Both have the model, prompts, chat template, reward, groups, optimizer and learning rate of examples/smollm2/run.toml,
float32, and a sequence-level ratio. Both answer the same 32 held-out sums greedily, before training and after every fifth
step, and a run ends when it gets 0.9 of them right. Each command is measured whole: imports and evaluations count for both.

TRL is installed as `against_trl` says. Two steps of each of its variants (one thread or two, `generate` or the continuous
batching of transformers) decide which one takes part. Its AsyncGRPOTrainer cannot: it sends weights by NCCL, to GPUs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import psutil

from offbeat.common.records.rows import EvalRow, StepRow
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load
from offbeat.deploy.local.quickstart.prepared import expand
from tests.benchmarks.against_trl import TRL, trl_python
from tests.benchmarks.measuring import NUM_ROUNDS, print_table, spread

RUN = Path(__file__).resolve().parents[2] / "examples/smollm2/run.toml"
TARGET = 0.9
"""Share of the held-out sums at which a run ends."""
EVALUATION_INTERVAL = 5
POLL_S = 1.0
TIMEOUT_S = 5400.0
"""Longest time of one run."""

TRIAL = """
import json, sys, time
from offbeat.common.processes.environment import prepare_environment
prepare_environment()  # or a torchvision that torch cannot load stops transformers
import datasets, torch
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from offbeat.actor.rewards.functions import math_answer
settings = json.loads(sys.argv[1])
torch.set_num_threads(settings["threads"])
tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")

def told(**row):
    with open(settings["progress"], "a") as stream:
        stream.write(json.dumps({"time": time.time(), **row}) + "\\n")

def reward(completions, answer, **_):
    return [math_answer("", completion[0]["content"], {"answer": one}) for completion, one in zip(completions, answer)]

def rows(file):
    return [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in map(json.loads, open(file))]

held_out = rows(settings["eval_data"])[:settings["num_prompts"]]

class Progress(TrainerCallback):
    def evaluate(self, model):
        model.eval()
        batch = tokenizer.apply_chat_template(
            [row["prompt"] for row in held_out], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            tokens = model.generate(**batch, do_sample=False, max_new_tokens=settings["max_new_tokens"])
        texts = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1]:], skip_special_tokens=True)
        scores = [math_answer("", text, row) for text, row in zip(texts, held_out)]
        told(held_out=sum(scores) / len(scores))
        model.train()

    def on_train_begin(self, args, state, control, model=None, **_):
        self.evaluate(model)

    def on_step_end(self, args, state, control, model=None, **_):
        told(step=state.global_step)
        if state.global_step % settings["interval"] == 0:
            self.evaluate(model)

config = GRPOConfig(
    output_dir=settings["out"], max_steps=settings["steps"], per_device_train_batch_size=settings["completions"],
    num_generations=settings["group_size"], max_completion_length=settings["max_new_tokens"],
    learning_rate=settings["learning_rate"], lr_scheduler_type="constant", warmup_steps=0, adam_beta2=settings["beta2"],
    weight_decay=0.0, beta=0.0, temperature=1.0, importance_sampling_level="sequence", loss_type="grpo", use_cpu=True,
    bf16=False, gradient_checkpointing=False, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
    seed=settings["seed"],
    model_init_kwargs={"dtype": "float32"}, use_transformers_continuous_batching=settings["continuous"],
)
trainer = GRPOTrainer(
    model=settings["model"], reward_funcs=reward, args=config, processing_class=tokenizer, callbacks=[Progress()],
    train_dataset=datasets.Dataset.from_list(rows(settings["train_data"])),
)
trainer.train()
"""


class Variant(NamedTuple):
    """A way to run TRL."""

    num_threads: int
    is_continuous: bool

    @property
    def name(self) -> str:
        """The program's name in tables."""
        generation = "continuous batching" if self.is_continuous else "generate"
        return f"TRL {TRL}, {self.num_threads} thread{'s' * (self.num_threads > 1)}, {generation}"


class Progress(NamedTuple):
    """The rows that a run has written so far; times as `time.time()` returns them."""

    steps: list[float]
    """End of each step."""
    evaluations: list[tuple[float, float]]
    """Time and reward of each evaluation."""


class Trial(NamedTuple):
    """One run of one program."""

    step_s: float
    """Median seconds a step, generation included."""
    held_out: float
    """Reward of the last evaluation."""
    wall_s: float | None
    """Seconds from the start to a held-out reward of `TARGET`; None if it was not reached."""
    cpu_s: float | None
    """CPU seconds of all processes until then."""
    memory_bytes: int
    """Largest sum of the processes' proportional set sizes."""


def watch(command: Sequence[str], log: Path, read: Callable[[], Progress], environment: dict[str, str] | None = None) -> Trial:
    """Run a command until it ends or reaches the target. Raise `RuntimeError` if it fails or takes too long."""
    started, largest, reached = time.time(), 0, None
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, process_group=0, env=environment)
    root = psutil.Process(process.pid)
    cpu_s = 0.0
    try:
        while process.poll() is None and reached is None:
            if time.time() - started > TIMEOUT_S:
                raise RuntimeError(f"did not end within {TIMEOUT_S:g} s:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(POLL_S)
            cpu_s, memory = _usage(root, cpu_s)
            largest = max(largest, memory)
            reached = next((at - started for at, reward in read().evaluations if reward >= TARGET), None)
    finally:
        _end(process)
    progress = read()
    # Ended by this function, a program ends with the signal's status.
    if (reached is None and process.returncode) or len(progress.steps) < 2:
        raise RuntimeError(f"ended with status {process.returncode}:\n{log.read_text(errors='replace')[-4000:]}")
    step_s = median(after - before for before, after in zip(progress.steps, progress.steps[1:], strict=False))
    last = progress.evaluations[-1][1]
    return Trial(step_s, last, reached, None if reached is None else cpu_s, largest)


def _usage(root: psutil.Process, cpu_before: float) -> tuple[float, int]:
    """Return CPU seconds and memory of a process and its descendants, those that have ended and were waited for included."""
    cpu_s, memory = 0.0, 0
    for process in _tree(root):
        try:
            cpu_s += sum(process.cpu_times()[:4])
            memory += process.memory_full_info().pss
        except psutil.Error:
            continue
    return max(cpu_s, cpu_before), memory


def _tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program in order, or by force after a minute."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_offbeat(seed: int, num_steps: int) -> Trial:
    """Run examples/smollm2/run.toml."""
    with tempfile.TemporaryDirectory(prefix="offbeat-benchmark-") as folder:
        run = Path(folder) / "run"

        def read() -> Progress:
            rows = list(read_rows(run / ROWS_FILE)) if (run / ROWS_FILE).exists() else []
            evaluations = [(row.time, row.reward or 0.0) for row in rows if isinstance(row, EvalRow)]
            return Progress([row.time for row in rows if isinstance(row, StepRow)], evaluations)

        command = [sys.executable, "-m", "offbeat.deploy.cli.main", "train", str(RUN), f"run.seed={seed}", f'run.dir="{run}"']
        settings = [f"num_steps={num_steps}", f"evaluation.interval={EVALUATION_INTERVAL}"]
        return watch([*command, *settings], Path(folder) / "log", read)


def run_trl(python: Path, config: Config, variant: Variant, seed: int, num_steps: int) -> Trial:
    """Run GRPOTrainer with the settings of the example."""
    with tempfile.TemporaryDirectory(prefix="offbeat-benchmark-") as folder:
        file = Path(folder) / "progress.jsonl"

        def read() -> Progress:
            # The last line may be half written.
            lines = file.read_text().split("\n")[:-1] if file.exists() else []
            rows: list[dict[str, float]] = [json.loads(line) for line in lines]
            evaluations = [(row["time"], row["held_out"]) for row in rows if "held_out" in row]
            return Progress([row["time"] for row in rows if "step" in row], evaluations)

        settings: dict[str, Any] = {
            "progress": str(file),
            "out": f"{folder}/out",
            "model": config.model.path,
            "train_data": config.data.train_data,
            "eval_data": config.data.eval_data,
            "num_prompts": config.evaluation.num_prompts,
            "interval": EVALUATION_INTERVAL,
            "steps": num_steps,
            "completions": config.train.groups_per_step * config.rollout.group_size,
            "group_size": config.rollout.group_size,
            "max_new_tokens": config.rollout.max_new_tokens,
            "learning_rate": config.train.learning_rate,
            "beta2": config.train.adam_betas[1],
            "seed": seed,
            "threads": variant.num_threads,
            "continuous": variant.is_continuous,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": str(variant.num_threads), "HF_HUB_OFFLINE": "1"}
        command = [str(python), "-c", TRIAL, json.dumps(settings)]
        return watch(command, Path(folder) / "log", read, environment)


def best_variant(python: Path, config: Config) -> Variant:
    """Return the variant of TRL whose second step is the fastest; print each."""
    seconds: dict[Variant, float] = {}
    for variant in (Variant(2, False), Variant(2, True), Variant(1, False)):
        try:
            seconds[variant] = run_trl(python, config, variant, 0, 2).step_s
            print(f"{variant.name}: {seconds[variant]:.1f} s for the second step", flush=True)
        except RuntimeError as error:
            print(f"{variant.name} does not run here: it {error}", flush=True)
    if not seconds:
        sys.exit("TRL does not run here")
    return min(seconds, key=lambda variant: seconds[variant])


def main() -> None:
    """Run both programs in turns; print costs and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--steps", type=int, default=60, help="largest number of steps of a run")
    arguments = parser.parse_args()
    python, config = trl_python(), expand(load(RUN))
    variant = best_variant(python, config)
    programs: dict[str, Callable[[int], Trial]] = {
        "offbeat": lambda seed: run_offbeat(seed, arguments.steps),
        variant.name: lambda seed: run_trl(python, config, variant, seed, arguments.steps),
    }
    trials: dict[str, list[Trial]] = {name: [] for name in programs}
    for seed in range(arguments.rounds):
        for name, run in programs.items():
            trials[name].append(run(seed))
            print(f"round {seed}, {name}: {trials[name][-1]}", flush=True)
    ours, theirs = trials.values()
    trials_text = [[name, *_cells(of_program, config)] for name, of_program in trials.items()]
    ratios = ["ratio, offbeat to TRL", f"{mean(b.step_s / a.step_s for a, b in zip(ours, theirs, strict=True)):.2f}"]
    for of_trial in (lambda trial: trial.wall_s, lambda trial: trial.cpu_s, lambda trial: trial.memory_bytes):
        ratios.append(_ratio([of_trial(trial) for trial in ours], [of_trial(trial) for trial in theirs]))
    print_table(
        f"SmolLM2-135M-Instruct, sums: median (min–max) of {arguments.rounds} rounds; the ratio is the mean over the rounds",
        ["program", "samples/s", f"s to a held-out {TARGET}", "CPU s to it", "peak memory, GiB", "held out at the end"],
        [*trials_text, [*ratios, ""]],
    )


def _cells(trials: Sequence[Trial], config: Config) -> list[str]:
    completions = config.train.groups_per_step * config.rollout.group_size
    return [
        spread([completions / trial.step_s for trial in trials]),
        _spread_of_known([trial.wall_s for trial in trials]),
        _spread_of_known([trial.cpu_s for trial in trials]),
        spread([trial.memory_bytes / 2**30 for trial in trials], 1),
        spread([trial.held_out for trial in trials], 3),
    ]


def _spread_of_known(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    missing = len(values) - len(known)
    return (spread(known, 0) if known else "") + (f" not reached: {missing}" if missing else "")


def _ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> str:
    """Return the mean of ours divided by theirs, over the rounds that have both."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return f"{mean(a / b for a, b in pairs):.2f}" if pairs else "not reached"


if __name__ == "__main__":
    main()
