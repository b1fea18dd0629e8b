"""The sample rows of a run: completions of some of its steps, and of each of its evaluations, as text."""

import math
from collections.abc import Callable, Sequence

from offbeat.common.records.rows import EvalSampleRow, Recorder, SampleRow
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.learner.leases.prompts import Prompt
from offbeat.protocols.payload import Turn

NUM_SAMPLED_STEPS = 25
"""Most steps of a run that are sampled, spread evenly, besides the first and the last."""
NUM_EVALUATION_SAMPLES = 8
"""Held-out prompts with a sample in each evaluation, spread evenly."""
MAX_TEXT = 2000
"""Longest text in a row, in characters: 25 steps of two completions, or as many evaluations, stay below a megabyte."""

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text, special tokens included."""


class SampleRows:
    """Records the best and the worst completion of some steps."""

    def __init__(self, num_steps: int, decode: Decode, record: Recorder) -> None:
        """`num_steps` is `train.num_steps`."""
        self._num_steps = num_steps
        self._interval = max(1, math.ceil(num_steps / NUM_SAMPLED_STEPS))
        self._decode = decode
        self._record = record

    def record(self, groups: Sequence[Group], policy_version: int) -> None:
        """Record samples of the step that trained on `groups` and made `policy_version`, if the step is one of the sampled."""
        if policy_version not in (1, self._num_steps) and policy_version % self._interval:
            return
        found = [(group, index) for group in groups for index in range(len(group.rollouts))]
        best, worst = (pick(found, key=lambda at: at[0].rollouts[at[1]].reward) for pick in (max, min))
        for group, index in (best,) if best == worst else (best, worst):
            self._record(self._row(group, index, policy_version))

    def _row(self, group: Group, index: int, policy_version: int) -> SampleRow:
        rollout = group.rollouts[index]
        return SampleRow(
            policy_version=policy_version,
            lease_id=group.lease_id,
            prompt_id=group.prompt_id,
            policy_lag=group.policy_lag(policy_version - 1),
            reward=rollout.reward,
            above_mean=rollout.reward - sum(other.reward for other in group.rollouts) / len(group.rollouts),
            finish_reason=rollout.finish_reason,
            num_tokens=len(rollout.token_ids),
            prompt=shorten(self._decode(group.prompt_token_ids.tolist()), MAX_TEXT),
            completion=shorten(written(rollout, self._decode), MAX_TEXT),
        )


class EvaluationSampleRows:
    """Records the first completion of some held-out prompts, the same ones in every evaluation."""

    def __init__(self, num_prompts: int, decode: Decode, record: Recorder) -> None:
        """`num_prompts` are evaluated in each round."""
        num_samples = min(num_prompts, NUM_EVALUATION_SAMPLES)
        self._prompt_ids = {num_prompts * index // num_samples for index in range(num_samples)}
        self._decode = decode
        self._record = record

    def record(self, prompt: Prompt, rollout: Rollout, policy_version: int) -> None:
        """Record a sample of the evaluation of `policy_version`, if the prompt is one of the sampled."""
        if prompt.prompt_id not in self._prompt_ids:
            return
        self._record(
            EvalSampleRow(
                policy_version=policy_version,
                prompt_id=prompt.prompt_id,
                data_set=prompt.data_set or None,
                reward=rollout.reward,
                finish_reason=rollout.finish_reason,
                num_tokens=len(rollout.token_ids),
                prompt=shorten(self._decode(prompt.token_ids.tolist()), MAX_TEXT),
                completion=shorten(written(rollout, self._decode), MAX_TEXT),
            )
        )


def written(rollout: Rollout, decode: Decode) -> str:
    """Return a completion as text; what an environment has added stands between ⟦ and ⟧, as the rewards of turns do.

    A turn that does not continue the one before begins a line, which says what it continues.
    """
    if not rollout.turns:
        return decode(rollout.token_ids.tolist())
    parts: list[str] = []
    sampled: list[int] = []
    """Sampled tokens that no context divides, decoded together: a character may have tokens of two turns."""
    for number, (turn, context, of_turn) in enumerate(rollout.pieces(), start=1):
        origin = _origin(number, turn)
        if origin or len(context):
            parts.append(decode(sampled) + origin)
            sampled = []
        if len(context):
            parts.append(f"⟦{decode(context.tolist())}⟧")
        sampled += of_turn.tolist()
        if turn.reward:
            parts.append(f"{decode(sampled)}⟦reward {turn.reward:g}⟧")
            sampled = []
    return "".join([*parts, decode(sampled)])


def _origin(number: int, turn: Turn) -> str:
    """Return the line that begins turn `number`, from 1, and says what it continues; empty where that is the turn before."""
    if turn.back == 1:
        return ""
    continued = number - turn.back
    what = "a new sequence" if not turn.back else f"from the end of turn {continued}" if continued else "from the prompt"
    return f"\n⟦turn {number}, {what}⟧\n"


def shorten(text: str, limit: int) -> str:
    """Return the text, or its beginning and its end, with the number of characters left out between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters left out ...] {text[len(text) - half :]}"
