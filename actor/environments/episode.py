"""One episode as the actor records it: the turns of the model, what each continues and has read, log-probs and versions.

prompt -- turn 0 -- turn 1 -- turn 3        turn 2 continues the end of turn 0 (a fork),
             `---- turn 2                   turn 4 nothing (a restart): its context is all that it has read
turn 4
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from offbeat.actor.engines.engine import Completion
from offbeat.actor.environments.messages import PROMPT
from offbeat.protocols.payload import Segment, Turn


class GroupMember(NamedTuple):
    """One episode of a group, over all its attempts."""

    lease_id: int
    number: int
    """Index of the episode in its group."""


@dataclass
class EpisodeTurn:
    """One turn of the model, from the function's request on."""

    continues: int | None
    """Number of the turn whose end it continues, or `PROMPT`; None: nothing."""
    context: Sequence[int]
    max_new_tokens: int
    completion: Completion | None = None
    """The sampled completion; None while it is being sampled."""
    is_withdrawn: bool = False
    """True when the function has stopped waiting for it; it leaves no tokens."""

    @property
    def is_sampled(self) -> bool:
        return self.completion is not None and not self.is_withdrawn

    @property
    def num_tokens(self) -> int:
        """Tokens that it has, or may get while it is being sampled."""
        if self.is_withdrawn:
            return 0
        return len(self.context) + (self.max_new_tokens if self.completion is None else len(self.completion.token_ids))


@dataclass
class Episode:
    """One episode: its turns in the order in which they were asked for."""

    member: GroupMember
    attempt: int
    prompt_token_ids: Sequence[int]
    started_at: float
    turn_started_at: float
    """Time since which the function has the word."""
    environment_s: float = 0.0
    """Seconds in which it had the word before."""
    turns: list[EpisodeTurn] = field(default_factory=list)
    sampling: set[int] = field(default_factory=set)
    """Numbers of the turns that are being sampled. While there is none, the function has the word."""
    finish_reason: Literal["stop", "length"] = "stop"
    """`length` for an episode that ended because no token fitted any more; the cut of a turn is its function's affair."""

    @property
    def name(self) -> str:
        """The name in messages to the worker."""
        return f"{self.member.lease_id}/{self.member.number}/{self.attempt}"

    @property
    def num_tokens(self) -> int:
        """Tokens of all turns and of the prompt; what several turns continue counts once."""
        return len(self.prompt_token_ids) + sum(turn.num_tokens for turn in self.turns)

    def request(self, number: int) -> str:
        """Return the engine's name of a turn."""
        return f"{self.name}/{number + 1}"

    def can_continue(self, continues: int | None) -> bool:
        """Return whether a turn may continue this one."""
        if continues is None or continues == PROMPT:
            return True
        return 0 <= continues < len(self.turns) and self.turns[continues].is_sampled

    def tokens_before(self, continues: int | None) -> list[int]:
        """Return all tokens of a sequence up to the end of a turn."""
        path: list[tuple[Sequence[int], Completion]] = []
        while continues is not None and continues != PROMPT:
            turn = self.turns[continues]
            assert turn.completion is not None
            path.append((turn.context, turn.completion))
            continues = turn.continues
        tokens = [] if continues is None else list(self.prompt_token_ids)
        for context, completion in reversed(path):
            tokens += [*context, *completion.token_ids.tolist()]
        return tokens

    def ask(self, turn: EpisodeTurn) -> str:
        """Add a turn that is to be sampled; return the engine's name of it."""
        number = len(self.turns)
        self.turns.append(turn)
        self.sampling.add(number)
        return self.request(number)

    def add(self, number: int, completion: Completion) -> None:
        """Add the tokens of a turn."""
        self.turns[number].completion = completion
        self.sampling.discard(number)

    def withdraw(self, number: int) -> None:
        """Forget a turn that nothing continues."""
        self.sampling.discard(number)
        if number < len(self.turns) and all(turn.continues != number for turn in self.turns):
            self.turns[number].is_withdrawn = True

    def completion(self, turn_rewards: Mapping[int, float], branch_rewards: Mapping[int, float]) -> Completion | None:
        """Return the sampled turns as a completion; None without any.

        The rewards are those of `Ended`. That of a turn without tokens goes to the turn before it.
        """
        places = {PROMPT: -1}
        turns: list[Turn] = []
        context: list[int] = []
        sampled: list[Completion] = []
        segments: list[Segment] = []
        num_tokens = 0
        for number, turn in enumerate(self.turns):
            reward = turn_rewards.get(number, 0.0)
            if turn.completion is None or turn.is_withdrawn:
                if turns and reward:
                    turns[-1] = msgspec.structs.replace(turns[-1], reward=turns[-1].reward + reward)
                continue
            place = places[number] = len(turns)
            back = 0 if turn.continues is None else place - places[turn.continues]
            branch_reward = branch_rewards.get(number, 0.0)
            turns.append(Turn(len(turn.context), len(turn.completion.token_ids), back, reward, branch_reward))
            context.extend(turn.context)
            sampled.append(turn.completion)
            for segment in turn.completion.segments:
                if not segments or segments[-1].policy_version != segment.policy_version:
                    segments.append(Segment(segment.policy_version, num_tokens + segment.first_token))
            num_tokens += len(turn.completion.token_ids)
        if not sampled:
            return None
        return Completion(
            self.name,
            np.concatenate([one.token_ids for one in sampled]),
            np.concatenate([one.behavior_logprobs for one in sampled]),
            self.finish_reason,
            tuple(segments),
            tuple(turns) if len(turns) > 1 or context else (),
            np.array(context, dtype=np.int32),
            self.environment_s,
        )
