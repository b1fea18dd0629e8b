"""The sample that a reward function receives, the answer of the judge that it asks, and the exceptions of both.

`import offbeat` imports this module, so the module itself imports no other package.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RewardUnavailable(Exception):  # noqa: N818, a state and no mistake of the program
    """Raise it in a reward function when the reward is temporarily unavailable: the completion is kept, and rewarded later."""


class Sample(NamedTuple):
    """One completion, with all that a reward may want to know."""

    prompt: str
    """The prompt as text, without the chat template; of a conversation, the content of its last message."""
    completion: str
    """The completion as text, without special tokens."""
    row: dict[str, Any]
    """The prompt's row in the data."""
    token_ids: "NDArray[np.int32]"
    """The sampled tokens, `[num_tokens]`."""
    finish_reason: Literal["stop", "length"]
    """`stop`: the model ended the completion. `length`: it was cut at `rollout.max_new_tokens`."""
    is_evaluation: bool
    """True for a held-out prompt, whose rewards are not trained on."""


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


JudgePrompt = str | Sequence[Mapping[str, Any]]
"""A question to the judge: the user's message, or a whole conversation."""
