"""The answers of the judge, and the error of a request that it refuses."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class JudgeError(Exception):
    """The judge refuses the request, and would refuse it again: a wrong key or model, or a prompt that is too long."""


class Verdict(NamedTuple):
    """The judge's answer."""

    text: str
    score: float | None = None
    """The number that `pattern` found in the text; None without a pattern."""
    num_tokens: int = 0
    """Tokens of request and answer as the server counts them; estimated where it does not tell, 0 for a cached answer."""
    is_cached: bool = False


Prompt = str | Sequence[Mapping[str, Any]]
"""The user's message, or a whole conversation."""
