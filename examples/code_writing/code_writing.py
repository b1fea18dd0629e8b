"""Rewards by running what the model wrote: a program earns 1 when it passes every unit test of its row, else 0."""

import asyncio
import json
from typing import Any

from offbeat import Sample, sandbox

PROGRAM = """
import json
code = compile(open("expression.txt").read(), "expression.txt", "eval")
for names in json.loads(input()):
    print(eval(code, names))
"""
"""Runs the model's expression once for each test. The right answers stay outside."""


async def solved(group: list[Sample]) -> list[float]:
    """Run each different completion of a group once; return their rewards."""
    codes = list(dict.fromkeys(sample.completion for sample in group))
    rewards = dict(zip(codes, await asyncio.gather(*(passes(code, group[0].row) for code in codes)), strict=True))
    return [rewards[sample.completion] for sample in group]


async def passes(code: str, row: dict[str, Any]) -> float:
    """Return 1 if the expression gives the right answer in every test."""
    result = await sandbox.run(
        PROGRAM, files={"expression.txt": code}, stdin=json.dumps(row["inputs"]), timeout_s=5, memory_mb=128
    )
    return float(result.exit_code == 0 and result.stdout.split() == [str(output) for output in row["outputs"]])
