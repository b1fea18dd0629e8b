"""A calculator as an environment: two functions that the model may call, and the reward of its answer."""

from typing import Any

from offbeat.environments import tools


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def is_right(answer: str, row: dict[str, Any]) -> float:
    """Return 1 for the right number."""
    return float(answer == row["answer"])


play = tools([add, multiply], reward=is_right, max_turns=3, max_result_tokens=8)
