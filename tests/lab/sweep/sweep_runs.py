"""Runs of a sweep without services: rows as a run writes them, and a stand-in for `offbeat train` that writes them."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START = 1_700_000_000.0
EVALUATION = {"length": 15.0, "num_completions": 8, "num_failed": 0}

STAND_IN = '''
"""Stands for `offbeat`: notes its start in `starts`, then does what the file `NAME.START` (or `NAME`, or `any`) says."""
import json, os, signal, sys, time, tomllib
from pathlib import Path

LEDGER = {"leased": 0, "trained": 0, "dropped": {}, "expired": 0, "in_flight": 0}
home = Path(sys.argv[1])
_, command, config_file, *settings = sys.argv[1:]
config = tomllib.loads(Path(config_file).read_text())
run = Path(config["run"]["dir"])
name = f"{config['staleness']['max_staleness']}-{config['run']['seed']}"
with (home / "starts").open("a") as file:
    print(name, command, *settings, file=file)
number = sum(line.split()[0] == name for line in (home / "starts").read_text().splitlines())


def row(kind, **fields):
    with (run / "metrics.jsonl").open("a") as file:
        print(json.dumps({"kind": kind, "time": time.time(), **fields}, separators=(",", ":")), file=file)


def write(*kinds, outcome="finished"):
    for kind in kinds:
        if kind == "step":
            row(kind, policy_version=1, **{"reward/mean": 0.5, "lag/counts": {"0": 2}, "time/step_s": 1.0})
        else:
            row(kind, policy_version=1, wall_s=1.0, ledger=LEDGER, outcome=outcome, detail="")


scripts = [home / f"{name}.{number}", home / name, home / "any"]
exec(next(script for script in scripts if script.exists()).read_text())
'''


def stand_in(home: Path) -> tuple[str, ...]:
    """Write the program into `home`, where it finds its instructions; return its command."""
    file = home / "stand_in.py"
    file.write_text(STAND_IN)
    (home / "any").write_text("write('step', 'final')")
    return (sys.executable, str(file), str(home))


def starts(home: Path) -> list[str]:
    """Return a line `MAX_STALENESS-SEED train [SETTING]...` for each start so far."""
    file = home / "starts"
    return file.read_text().splitlines() if file.exists() else []


def rows_of_run(
    rewards: Sequence[float], *, step_s: float = 2.0, first_wait_s: float = 30.0, waited_s: float = 0.5, lag: int = 1
) -> list[dict[str, Any]]:
    """Return the rows of a finished run of two groups a step, waiting `first_wait_s` at first and `waited_s` in later steps."""
    rows: list[dict[str, Any]] = [{"kind": "event", "time": START, "event": "run_started", "detail": "offbeat 9.9"}]
    at = START
    for index, reward in enumerate(rewards):
        start_s = 0 if index else first_wait_s
        at += start_s + step_s
        row = {"kind": "step", "time": at, "policy_version": index + 1, "reward/mean": reward, "lag/counts": {str(lag): 2}}
        row |= {"time/step_s": start_s + step_s, "time/wait_rollouts_s": start_s or waited_s}
        row |= {"tokens/trained": 100, "clip/fraction": 0.25, "ratio/log_std": 0.01, "kl/behavior_policy_k3": 1e-3}
        rows.append(row)
        for lease_id in (2 * index, 2 * index + 1):
            rows.append(_group(lease_id, at, lag))
    rows.append({"kind": "eval", "time": at, "policy_version": len(rewards), "reward": 0.75} | EVALUATION)
    for second, tokens in ((0, 0), (10, 900)):
        seconds = {"generate": 0.75 * second, "wait_leases": 0.25 * second}
        row = {"kind": "actor", "time": START + second, "actor": "a0", "policy_version": 1, "seconds": seconds}
        rows.append(row | {"num_generated_tokens": tokens, "num_groups_sent": 1, "num_running_completions": 1})
    ledger = {"leased": 2 * len(rewards), "trained": 2 * len(rewards), "dropped": {}, "expired": 0, "in_flight": 0}
    final = {"kind": "final", "time": at, "policy_version": len(rewards), "wall_s": at - START, "ledger": ledger}
    return [*rows, final | {"outcome": "finished", "detail": ""}]


def _group(lease_id: int, at: float, lag: int) -> dict[str, Any]:
    row = {"kind": "group", "time": at, "lease_id": lease_id, "prompt_id": 0, "actor": "a0", "reason": "", "lengths": [10, 20]}
    return (
        row
        | {"outcome": "trained", "policy_lag": lag, "policy_version": 1, "rewards": [0.0, 1.0], "generate_s": 0.5}
        | {"num_segments": 1, "taken_at": at}
    )


def write_rows(folder: Path, rows: Sequence[object]) -> None:
    """Write the rows into the folder of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
