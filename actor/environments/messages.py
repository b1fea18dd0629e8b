"""The messages between an actor and the processes that run its environment.

    actor  -> Begin, PlayEpisode, TurnSampled, CancelEpisode -> worker
    worker -> Ready, SampleTurn, Withdraw, Ended, Failed -> actor

A `Pipe` carries them, and neither side waits for the other. The user's code runs in the worker, so whatever comes from there is
checked before it is used.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from offbeat.common.settings.config import Config
from offbeat.protocols.fields import FreeText, Natural, Positive, RewardParts

PROMPT = -1
"""Stands for the lease's prompt among the numbers of turns, which are from 0."""


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message to a worker: what all episodes share."""

    config: Config
    model: str
    """Folder of the model."""


class PlayEpisode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An episode begins."""

    episode: str
    """The lease, the index in its group and the attempt: `17/3/0`."""
    row: str
    """The prompt's row in the data, as JSON."""
    prompt: str
    num_prompt_tokens: int
    prompt_digest: str = ""
    """`digest_of` its tokens."""
    max_new_tokens: int
    """`rollout.max_new_tokens`."""
    seed: int
    """Every episode of a group has the same seed."""
    is_evaluation: bool


class TurnSampled(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to a `SampleTurn`."""

    episode: str
    turn: int
    """Number of the `SampleTurn`, from 0, in the order in which they were sent."""
    token_ids: list[int]
    finish_reason: str


class CancelEpisode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Nobody waits for this episode any more. The worker answers with `Failed` unless it has ended."""

    episode: str


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker can play, or says why not."""

    problem: FreeText = ""


class SampleTurn(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The function waits for a turn of the model. The samples of an episode are numbered from 0, in the order sent."""

    episode: str
    back: Natural = 1
    """Number of samples to go back to the one whose end this one continues, as `protocols.payload.Turn` has it."""
    context: list[Natural]
    """Tokens that the model reads first, after those that this one continues."""
    max_new_tokens: Positive


class Withdraw(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The function no longer waits for a turn, which leaves no tokens. Nothing continues it."""

    episode: str
    turn: Natural


class Ended(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The function has returned."""

    episode: str
    reward: float
    parts: RewardParts
    is_out_of_room: bool
    """True when the function has ended because no token fitted any more."""
    turn_rewards: dict[Natural, float] = {}
    """Parts of the reward that were given before the end, by the number of the sample asked for last; without those given
    before the first."""
    branch_rewards: dict[Natural, float] = {}
    """These parts by the number of the last turn of the sequence that each was given to. A sequence without a turn has none."""


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The function has raised, or was cancelled."""

    episode: str
    is_transient: bool
    """True when the same episode may succeed later."""
    detail: FreeText
    traceback: str = ""


ToWorker = Begin | PlayEpisode | TurnSampled | CancelEpisode
OfEpisode = SampleTurn | Withdraw | Ended | Failed
FromWorker = Ready | OfEpisode


def digest_of(token_ids: Sequence[int]) -> str:
    """Return a hash of tokens."""
    return hashlib.sha256(np.asarray(token_ids, dtype=np.int32).tobytes()).hexdigest()


TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER = msgspec.msgpack.Decoder(FromWorker)
