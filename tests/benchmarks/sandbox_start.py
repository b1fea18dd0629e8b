"""The cost of a sandbox, compared with the bare interpreter in the same run.

    python -m tests.benchmarks.sandbox_start    # half a minute

Each variant runs `print(1)` to its end, one after the other in turns:

    bare          the interpreter as a plain subprocess, with the flags it has in the sandbox
    bubblewrap    `sandbox.run_sync` with this backend
    Landlock      the same with the other

CPU time is of all processes, this one included, and depends less on other load than wall time.
"""

import subprocess
import time
from collections.abc import Callable
from os import times

from offbeat.actor.sandbox.program import INTERPRETER
from offbeat.sandbox import Local, run_sync, use
from tests.benchmarks.measuring import print_table, spread

CODE = "print(1)"
NUM_ROUNDS = 9
NUM_RUNS = 10
"""Programs of each variant in a round."""


def run_bare() -> None:
    """Run the program without a sandbox."""
    subprocess.run([*INTERPRETER, "-c", CODE], capture_output=True, check=True)


def in_sandbox(box: Local) -> Callable[[], None]:
    """Return a function that runs the program in this sandbox."""

    def run() -> None:
        use(box)
        assert run_sync(CODE).stdout == "1\n"

    return run


def cost(run: Callable[[], None]) -> tuple[float, float]:
    """Return wall and CPU time of one program in milliseconds, the mean of a round."""
    before, started = sum(times()[:4]), time.monotonic()
    for _ in range(NUM_RUNS):
        run()
    wall_s, cpu_s = time.monotonic() - started, sum(times()[:4]) - before
    return 1000 * wall_s / NUM_RUNS, 1000 * cpu_s / NUM_RUNS


def main() -> None:
    """Measure and print the table."""
    variants = {
        "bare": run_bare,
        "bubblewrap": in_sandbox(Local("bubblewrap")),
        "Landlock": in_sandbox(Local("landlock")),
    }
    for run in variants.values():
        run()
    rounds = [{name: cost(run) for name, run in variants.items()} for _ in range(NUM_ROUNDS)]
    rows = []
    for name in variants:
        wall, cpu = ([one[name][index] for one in rounds] for index in (0, 1))
        ratio = [one[name][1] / one["bare"][1] for one in rounds]
        rows.append([name, spread(wall, 0), spread(cpu, 0), spread(ratio, 1)])
    print_table("Start of a program", ["variant", "wall ms", "CPU ms", "CPU time over bare"], rows)


if __name__ == "__main__":
    main()
