"""Numbers of one's own about an evaluation (docs/own_code.md).

[evaluation]
function = "own_numbers:digits"
"""

from collections.abc import Sequence

from offbeat.learner.diagnostics.own_evaluation import EvaluatedCompletion


def digits(completions: Sequence[EvaluatedCompletion]) -> dict[str, float]:
    """Return the share of answers' digits that are in their place, and the share of completions that repeat the prompt."""
    right = total = copies = 0
    for each in completions:
        answer = each.row["answer"]
        right += sum(given == wanted for given, wanted in zip(each.completion, answer, strict=False))
        total += len(answer)
        copies += each.completion == answer[::-1]
    return {"digits_right": right / total, "copies": copies / len(completions)}
