"""A group as the learner holds it: arrays, rewards and versions, cut out of the wire's frames and checked."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, assert_never

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.common.models.images import ImageFile
from offbeat.learner.leases.events import Accepted
from offbeat.learner.leases.prompts import Prompt
from offbeat.protocols.fields import LARGEST_REWARD
from offbeat.protocols.messages import GroupDone
from offbeat.protocols.payload import CompletionMeta, CompressionError, Segment, Turn, decode_experts, path_lengths
from offbeat.protocols.wire import Frame, has_context, logprobs, token_ids

LagOf = Literal["oldest_token", "token_mean", "last_segment"]
"""The measure of a group's lag when the weights changed during a completion: `staleness.lag_of`."""

# Rounding may put the log-prob of a sure token a hair above 0.
LARGEST_LOGPROB = 1e-4
# A softmax in float32 gives 0 below exp(-104), and a token of probability 0 is never sampled.
SMALLEST_LOGPROB = -1000.0


_NO_CONTEXT = np.empty(0, dtype=np.int32)


class Rollout(NamedTuple):
    """One completion of a group: its sampled tokens, and the context between them where an environment added some."""

    token_ids: NDArray[np.int32]
    """The sampled tokens, `[num_tokens]`."""
    behavior_logprobs: NDArray[np.float32]
    """`[num_tokens]`, between `SMALLEST_LOGPROB` and `LARGEST_LOGPROB`."""
    reward: float
    finish_reason: str
    segments: tuple[Segment, ...]
    reward_parts: Mapping[str, float] = {}
    """Named parts of the reward; empty where it is a number alone."""
    turns: tuple[Turn, ...] = ()
    """Empty where all tokens after the prompt were sampled, in one sequence."""
    context_ids: NDArray[np.int32] = _NO_CONTEXT
    """The context of all turns, concatenated."""
    environment_s: float = 0.0
    """Seconds that the episode's function spent outside of the model's turns; 0 without an environment."""

    @property
    def num_turns(self) -> int:
        """Turns of the model; an episode to which nothing was added has one, and no list of them."""
        return max(1, len(self.turns))

    @property
    def turn_lengths(self) -> list[int]:
        """Sampled tokens of each turn."""
        return [turn.num_sampled for turn in self.turns] or [len(self.token_ids)]

    @property
    def token_turns(self) -> NDArray[np.int64]:
        """The turn of each sampled token, counted from 0, `[num_tokens]`."""
        return np.repeat(np.arange(self.num_turns), self.turn_lengths)

    @property
    def longest_turn(self) -> int:
        """Sampled tokens of the longest turn, which `rollout.max_new_tokens` bounds."""
        return max(self.turn_lengths)

    def token_lags(self, policy_version: int) -> NDArray[np.int64]:
        """Return the optimizer steps from each token's policy version to `policy_version`, `[num_tokens]`.

        They are below 0 for a token that is newer, which `policy_lag` of a group explains.
        """
        starts = [segment.first_token for segment in self.segments]
        lags = [policy_version - segment.policy_version for segment in self.segments]
        return np.repeat(lags, np.diff([*starts, len(self.token_ids)]))

    def returns_to_go(self, reward: float) -> NDArray[np.float64]:
        """Return for each turn what of the episode's `reward`, shaped or not, was given after the turn was asked for."""
        given_before = [0.0, *(turn.reward for turn in self.turns[:-1])]
        return reward - np.cumsum(given_before)

    def branch_returns(self, reward: float) -> NDArray[np.float64]:
        """Return for each turn the episode's `reward`, shaped or not, without what other branches were given.

        Those are sequences that the turn neither leads to nor continues.
        """
        if not self.turns:
            return np.array([reward])
        continued = np.eye(len(self.turns), dtype=bool)
        for index, turn in enumerate(self.turns):
            if 0 < turn.back <= index:
                continued[index] |= continued[index - turn.back]
        elsewhere = ~(continued | continued.T)
        return reward - elsewhere.astype(np.float64) @ np.array([turn.branch_reward for turn in self.turns])

    def pieces(self) -> Iterator[tuple[Turn, NDArray[np.int32], NDArray[np.int32]]]:
        """Yield each turn with its context and its sampled tokens."""
        context_start = start = 0
        for turn in self.turns:
            context_end, end = context_start + turn.num_context, start + turn.num_sampled
            yield turn, self.context_ids[context_start:context_end], self.token_ids[start:end]
            context_start, start = context_end, end


class EngineExperts(NamedTuple):
    """The experts that the engine sent a group's tokens to, compressed."""

    content: NDArray[np.uint8]
    shape: tuple[int, int, int]
    """Tokens, as `ExpertsMeta` orders them, layers and slots."""

    def load(self) -> NDArray[np.uint8]:
        """Return them, `[tokens, layers, top_k]`."""
        return decode_experts(self.content.data, self.shape)


class ExpertLimits(NamedTuple):
    """The routers of the run's model."""

    num_layers: int
    top_k: int
    num_experts: int


class Group(NamedTuple):
    """All completions of one lease."""

    lease_id: int
    prompt_id: int
    prompt_token_ids: NDArray[np.int32]
    rollouts: tuple[Rollout, ...]
    actor: str
    generate_s: float
    weight: float = 1.0
    """Weight of the group in the loss (`data.weight_field`)."""
    task: str = ""
    """Name of the task (`data.task_field`); empty where tasks are not told apart."""
    images: tuple[ImageFile, ...] = ()
    """The images of the prompt."""
    experts: EngineExperts | None = None
    """The engine's choice of experts; None unless the run replays its routing."""

    @property
    def has_environment(self) -> bool:
        """True when its completions are episodes that an environment played."""
        return any(rollout.turns or rollout.environment_s for rollout in self.rollouts)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version in any segment of any completion."""
        return min(segment.policy_version for rollout in self.rollouts for segment in rollout.segments)

    @property
    def newest_version(self) -> int:
        """The newest policy version in any segment of any completion."""
        return max(segment.policy_version for rollout in self.rollouts for segment in rollout.segments)

    def policy_lag(self, policy_version: int) -> int:
        """Return the optimizer steps between the oldest token of the group and `policy_version`, at least 0.

        A group can be newer than the learner: sampled under weights of a learner that died before it saved them.
        """
        return max(0, policy_version - self.oldest_version)

    def lag_of(self, measured: LagOf, policy_version: int) -> float:
        """Return the lag at `policy_version` in optimizer steps, measured as `staleness.lag_of` says, at least 0."""
        match measured:
            case "oldest_token":
                return self.policy_lag(policy_version)
            case "token_mean":
                num_tokens = sum(len(rollout.token_ids) for rollout in self.rollouts)
                return max(0.0, policy_version - sum(map(_sum_versions, self.rollouts)) / num_tokens)
            case "last_segment":
                return max(0, policy_version - min(rollout.segments[-1].policy_version for rollout in self.rollouts))
            case _:
                assert_never(measured)


class Limits(NamedTuple):
    """The limits that a group must keep to."""

    group_size: int
    max_new_tokens: int
    vocabulary_size: int
    max_length: int
    """Most tokens after the prompt in a sequence of an episode; 0 in a run without an environment, where no completion has
    turns."""
    max_episode_tokens: int
    """Most tokens of an episode in all its sequences, what several of them share counted once."""


def _sum_versions(rollout: Rollout) -> int:
    """Return the sum of the policy versions of all tokens."""
    ends = [segment.first_token for segment in rollout.segments[1:]] + [len(rollout.token_ids)]
    return sum(
        segment.policy_version * (end - segment.first_token) for segment, end in zip(rollout.segments, ends, strict=True)
    )


def make_group(accepted: Accepted, arrays: Sequence[Frame], prompt: Prompt) -> Group:
    """Return the group of an `Accepted` event, live or read from the log; `prompt` is its lease's."""
    experts = accepted.experts
    return Group(
        lease_id=accepted.lease_id,
        prompt_id=prompt.prompt_id,
        prompt_token_ids=prompt.token_ids,
        weight=prompt.weight,
        task=prompt.task,
        rollouts=unpack(accepted.completions, arrays),
        actor=accepted.actor,
        generate_s=accepted.generate_s,
        images=prompt.images,
        experts=None
        if experts is None
        else EngineExperts(np.frombuffer(arrays[-1], np.uint8), experts.shape(accepted.completions)),
    )


def unpack(completions: Sequence[CompletionMeta], arrays: Sequence[Frame]) -> tuple[Rollout, ...]:
    """Cut the completions of a group out of its frames, without a copy."""
    all_ids, all_logprobs = token_ids(arrays[0]), logprobs(arrays[1])
    all_context = token_ids(arrays[2]) if has_context(completions) else _NO_CONTEXT
    rollouts, start, context_start = [], 0, 0
    for completion in completions:
        end = start + completion.num_tokens
        ids, behavior = all_ids[start:end], all_logprobs[start:end]
        # By position: the hub makes one for each completion that arrives, and names take twice the time.
        rollout = Rollout(
            ids, behavior, completion.reward, completion.finish_reason, completion.segments, completion.reward_parts
        )
        if completion.turns:
            context_end = context_start + sum(turn.num_context for turn in completion.turns)
            rollout = rollout._replace(turns=completion.turns, context_ids=all_context[context_start:context_end])
            context_start = context_end
        if completion.environment_s:
            rollout = rollout._replace(environment_s=completion.environment_s)
        rollouts.append(rollout)
        start = end
    return tuple(rollouts)


def flaw(completions: Sequence[CompletionMeta], arrays: Sequence[Frame], limits: Limits, newest_version: int) -> str | None:
    """Return why this group cannot be trained on; None for a good one. `protocols.wire` has checked that the lengths agree.

    `newest_version` is the newest policy version that any learner process of this run has made.
    """
    if len(completions) != limits.group_size:
        return f"{len(completions)} completions for a group of {limits.group_size}"
    for index, completion in enumerate(completions):
        flaw = _length_flaw(completion, limits) or _reward_flaw(completion)
        if flaw is not None:
            return f"completion {index} has {flaw}"
        for segment in completion.segments:
            if segment.policy_version > newest_version:
                return f"completion {index} claims policy version {segment.policy_version}, not made yet"
    # All completions at once: on short ones numpy's cost is by call, not by token.
    values = logprobs(arrays[1])
    of_ids = (arrays[0], arrays[2]) if has_context(completions) else (arrays[0],)
    if not all(_is_in_vocabulary(array, limits) for array in of_ids):
        return "it has token ids outside the vocabulary"
    if not (values.min() >= SMALLEST_LOGPROB and values.max() <= LARGEST_LOGPROB):
        return "it has impossible log-probs"
    return None


def expert_flaw(done: GroupDone, content: Frame, limits: ExpertLimits, *, num_prompt_tokens: int) -> str | None:
    """Return why a group's experts, in its last frame, cannot be replayed; None for good ones."""
    experts = done.experts
    if experts is None:
        return 'no experts, and loss.routing_replay = "sampled" replays those of the engine'
    theirs = experts.num_prompt_tokens, experts.num_layers, experts.top_k
    ours = num_prompt_tokens, limits.num_layers, limits.top_k
    if theirs != ours:
        return f"experts of {theirs} prompt tokens, layers and slots, not {ours}"
    shape = experts.shape(done.completions)
    try:
        found = decode_experts(content, shape)
    except CompressionError as error:
        return f"broken experts: {len(content)} bytes are not the experts of {shape[0]} tokens: {error}"
    return "experts that the model does not have" if found.max() >= limits.num_experts else None


def _length_flaw(completion: CompletionMeta, limits: Limits) -> str | None:
    turns, most = completion.turns, limits.max_new_tokens
    longest = max(turn.num_sampled for turn in turns) if turns else completion.num_tokens
    if longest > most:
        return f"{longest} tokens, more than {most}"
    if not turns:
        return None
    length = max(path_lengths(turns))
    if length > limits.max_length:
        return f"{length} tokens with its context, more than {limits.max_length}"
    num_tokens = completion.num_tokens + sum(turn.num_context for turn in turns)
    if num_tokens > limits.max_episode_tokens:
        return f"{num_tokens} tokens in its sequences, more than {limits.max_episode_tokens}"
    return None


def _reward_flaw(completion: CompletionMeta) -> str | None:
    # Not `>`: a NaN must not pass.
    if not abs(completion.reward) <= LARGEST_REWARD:
        return f"reward {completion.reward:g}, not within {LARGEST_REWARD:g} of 0"
    if not all(
        abs(reward) <= LARGEST_REWARD for turn in completion.turns or () for reward in (turn.reward, turn.branch_reward)
    ):
        return f"a turn whose reward is not within {LARGEST_REWARD:g} of 0"
    if completion.reward_parts and not all(abs(part) <= LARGEST_REWARD for part in completion.reward_parts.values()):
        return f"reward parts {completion.reward_parts}, not within {LARGEST_REWARD:g} of 0"
    return None


def _is_in_vocabulary(array: Frame, limits: Limits) -> bool:
    # Unsigned, a negative id is a huge one.
    return bool(token_ids(array).view(np.uint32).max(initial=0) < limits.vocabulary_size)


RECENT_GROUPS = 64
"""Number of the newest groups of a task whose rewards are kept."""


class GroupRewards(NamedTuple):
    """The rewards of a group's completions, as the task gave them."""

    mean: float
    lowest: float
    highest: float


class Tally(msgspec.Struct, forbid_unknown_fields=True):
    """The groups of one task."""

    num_groups: int = 0
    recent: list[GroupRewards] = []
    """The newest `RECENT_GROUPS`, oldest first."""


Tallies = dict[str, Tally]
"""The groups of each task that has any, by the task's name."""


def add_group(tallies: Tallies, group: Group) -> None:
    """Add a group to those of its task, where tasks are told apart."""
    if not group.task:
        return
    tally = tallies.setdefault(group.task, Tally())
    rewards = [rollout.reward for rollout in group.rollouts]
    tally.num_groups += 1
    tally.recent.append(GroupRewards(sum(rewards) / len(rewards), min(rewards), max(rewards)))
    del tally.recent[:-RECENT_GROUPS]


def copy_tallies(tallies: Mapping[str, Tally]) -> Tallies:
    """Return tallies that do not change with these."""
    return {task: Tally(tally.num_groups, [*tally.recent]) for task, tally in tallies.items()}


class TaskResults(NamedTuple):
    """One task as `data.curriculum` sees it."""

    num_prompts: int
    """Prompts of the task in the training data."""
    share: float
    """Share of them that is leased now, 0 to 1."""
    num_groups: int = 0
    """Groups that ended so far: trained on, or dropped because all rewards are equal (`loss.zero_variance`)."""
    recent: tuple[GroupRewards, ...] = ()
    """Rewards of the newest of them, at most `RECENT_GROUPS`, oldest first."""

    @property
    def reward(self) -> float | None:
        """Mean reward of the recent groups; None before the first."""
        return sum(group.mean for group in self.recent) / len(self.recent) if self.recent else None

    @property
    def without_signal(self) -> float | None:
        """Share of the recent groups whose rewards are all equal; None before the first."""
        return sum(group.lowest == group.highest for group in self.recent) / len(self.recent) if self.recent else None


def task_results(
    num_prompts: Mapping[str, int], shares: Mapping[str, float], tallies: Mapping[str, Tally]
) -> dict[str, TaskResults]:
    """Return the results of each task that `num_prompts` names; a task without a share is leased whole."""
    return {
        task: TaskResults(number, shares.get(task, 1.0), tally.num_groups, tuple(tally.recent))
        for task, number in num_prompts.items()
        for tally in (tallies.get(task, Tally()),)
    }
