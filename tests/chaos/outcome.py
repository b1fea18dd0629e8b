"""The claims about a round's end: the run finished, and learned."""

import math
from pathlib import Path

import numpy as np

from offbeat.common.records.rows import EvalRow, StepRow
from offbeat.common.records.run_folder import MODEL
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.lab.audit import Check, final_row


def check_outcome(run: Path, num_steps: int) -> Check:
    """Check that the run made all its steps and saved a model."""
    final = final_row(run)
    outcome, version = (final.outcome, final.policy_version) if final else ("none", 0)
    violations = [] if (outcome, version) == ("finished", num_steps) else [f"{outcome} at step {version} of {num_steps}"]
    if not list((run / MODEL).glob("*.safetensors")):
        violations.append("there is no trained model")
    return Check("the run finished", violations, f"{outcome} at step {version}")


def check_learning(run: Path, least: float) -> Check:
    """Check that the rewards of the last ten steps and of the last held-out evaluation are at least `least`."""
    steps = {row.policy_version: row for row in read_rows_of(run / ROWS_FILE, StepRow)}
    last = [steps[version].measured("reward/mean") for version in sorted(steps)[-10:]]
    evaluations = list(read_rows_of(run / ROWS_FILE, EvalRow))
    held_out = evaluations[-1].reward if evaluations else 0.0
    rewards = {
        "last 10 steps": float(np.mean(last)) if last else 0.0,
        "held out": math.nan if held_out is None else held_out,
    }
    violations = [f"{name}: {reward:.3f}" for name, reward in rewards.items() if not reward >= least]
    seen = ", ".join(f"{name} {reward:.3f}" for name, reward in rewards.items())
    return Check(f"the reward is at least {least:g}", violations, seen)
