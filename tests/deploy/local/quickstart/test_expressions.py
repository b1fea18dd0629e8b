"""The expressions task: its rows are right, its warm start shows what it says, and its reward runs programs."""

import asyncio
import random
from typing import Any

import numpy as np

from examples.code_writing.code_writing import solved
from offbeat import Sample
from offbeat.deploy.local.quickstart.tiny_tasks import PROGRAM_LENGTH, formula_row, python_of, shown_program

ROW: dict[str, Any] = {
    "prompt": "*+abc=",
    "inputs": [{"a": 2, "b": 3, "c": 5}, {"a": 7, "b": 11, "c": 13}],
    "outputs": [25, 234],
}


def reward_of(completion: str) -> float:
    return rewards_of([completion])[0]


def rewards_of(completions: list[str]) -> list[float]:
    samples = [Sample(ROW["prompt"], one, ROW, np.zeros(1, dtype=np.int32), "stop", False) for one in completions]
    return asyncio.run(solved(samples))


def test_tests_of_a_row_are_passed_by_its_formula_only() -> None:
    row = formula_row("-", "*", ("d", "a", "f"), random.Random(0))
    assert row["prompt"] == "-*daf="
    assert row["outputs"] == [test["d"] * test["a"] - test["f"] for test in row["inputs"]]
    assert python_of("-", "*", "d", "a", "f") == "(d*a)-f"


def test_a_right_program_in_any_writing_earns_one_and_others_nothing() -> None:
    programs = {"(a+b)*c": 1.0, "c*(b+a)": 1.0, "a+b*c": 0.0, "a+b)*c": 0.0, "": 0.0, "25": 0.0, "1/0": 0.0}
    # Twice: what a group has several times is run once.
    assert rewards_of(2 * list(programs)) == 2 * list(programs.values())


def test_a_program_cannot_see_the_answers() -> None:
    # A name that is not in the row, and what runs the program.
    assert reward_of("outputs[0]") == 0.0
    assert reward_of("print(25)") == 0.0


def test_warm_start_shows_each_kind_of_program() -> None:
    generator = random.Random(0)
    shown = {shown_program("*", "+", ("a", "b", "c"), generator) for _ in range(50)}
    texts = {text.removeprefix("*+abc=").rstrip().removesuffix("$") for text, _ in shown}
    assert texts == {"(a+b)*c", "(a*b)+c", "(c+a)*b", "a+b)*c"}
    assert all(len(text) == len(mask) == len("*+abc=") + PROGRAM_LENGTH for text, mask in shown)
    assert {mask for _, mask in shown} == {"......xxxxxxxx", "......xxxxxxx."}
