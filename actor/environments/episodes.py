"""The episodes of leases: every token that the model reads or samples in them, with log-probs and policy versions.

    begin(lease) -> PlayEpisode -> worker
    SampleTurn(context) from a worker -> engine.submit(tokens so far, context) -> completion -> TurnSampled -> worker
    Ended from every member of a group -> `RewardedGroup`

Only this side writes the tokens of an episode; history is never tokenized again. An episode that waits for its function holds
nothing in the engine.

An episode that ran out of time or lost its process is played again from its prompt at once, `environment.max_retries` times.
One whose judge or tool is down is played again with back-off for `task.reward_retry_s`, as rewards are (`rewards/retries.py`),
and its group keeps its place meanwhile.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

import msgspec

from offbeat.actor.engines.engine import Completion, Engine
from offbeat.actor.environments import messages
from offbeat.actor.environments.episode import Episode, EpisodeTurn, GroupMember
from offbeat.actor.environments.workers import Workers
from offbeat.actor.rewards.failures import SamplingFailure
from offbeat.actor.rewards.functions import Reward
from offbeat.actor.rewards.retries import Retries
from offbeat.actor.sampling import RewardedGroup
from offbeat.common.models.images import ImagePatches
from offbeat.common.settings.config import Config, max_episode_tokens
from offbeat.protocols.messages import Lease
from offbeat.protocols.payload import MAX_TURNS

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Seconds within which a cancelled episode must end. After that its process is killed."""


@dataclass
class _Lease:
    lease: Lease
    prompt_token_ids: list[int]
    began_at: float
    cached_at: int | None = None
    """Weights under which the group's first turn was sampled, as `Engine.num_loads`; its later turns start on the cache of that
    time. None before it, and where nothing of older weights may be used."""
    num_begun: Counter[int] = field(default_factory=Counter)
    """Attempts at each episode, by its number in the group."""
    num_lost: Counter[int] = field(default_factory=Counter)
    """Attempts that ran out of time or lost their process."""
    ended: dict[int, tuple[Completion, Reward]] = field(default_factory=dict)


class _Closing(NamedTuple):
    """A cancelled episode that its worker has not ended yet."""

    since: float
    late: GroupMember | None
    """The episode to play again once it has ended, because it took too long; None when nobody waits for it."""
    detail: str = ""
    """The limit that it exceeded, in words."""


class Episodes:
    """The episodes at work; see `SingleTurns` for the methods."""

    def __init__(self, engine: Engine, workers: Workers, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._workers = workers
        self._config = config
        self._limits = config.environment
        self._clock = clock
        self.retries: Retries[GroupMember] = Retries("episodes", config.task.reward_retry_s, lambda member: member.lease_id)
        self._leases: dict[int, _Lease] = {}
        self._episodes: dict[str, Episode] = {}
        self._requests: dict[str, tuple[Episode, int]] = {}
        """The episode, and the number of its turn, of each request to the engine."""
        self._closing: dict[str, _Closing] = {}
        self._outcomes: list[RewardedGroup | SamplingFailure] = []
        self._counts: defaultdict[str, float] = defaultdict(float)
        """The counts so far, by the names that `ActorRow.environment` explains."""

    @property
    def is_waiting(self) -> bool:
        return bool(self._leases)

    def begin(self, lease: Lease, prompt_token_ids: list[int], images: Sequence[ImagePatches] = ()) -> None:
        assert not images, "the settings refuse images in episodes"
        self._leases[lease.lease_id] = _Lease(lease, prompt_token_ids, self._clock())
        for index in range(lease.group_size):
            self._play(GroupMember(lease.lease_id, index))

    def add(self, completion: Completion) -> None:
        if completion.request_id not in self._requests:
            return
        episode, number = self._requests.pop(completion.request_id)
        episode.add(number, completion)
        self._counts["turns"] += 1
        episode.turn_started_at = self._clock()
        answer = messages.TurnSampled(
            episode=episode.name, turn=number, token_ids=completion.token_ids.tolist(), finish_reason=completion.finish_reason
        )
        self._workers.send(episode.name, answer)

    def poll(self) -> list[RewardedGroup | SamplingFailure]:
        for message in self._workers.poll():
            if isinstance(message, str):
                self._take_death(message)
            else:
                self._handle(message)
        self._end_late_episodes()
        for member in self.retries.take_due(self._clock()):
            self._play(member)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def cancel(self, lease_id: int) -> None:
        of_lease = self._leases.pop(lease_id, None)
        for index in range(of_lease.lease.group_size if of_lease is not None else 0):
            self.retries.forget(GroupMember(lease_id, index))
        for episode in [one for one in self._episodes.values() if one.member.lease_id == lease_id]:
            self._close(episode, _Closing(self._clock(), None))

    def counts(self) -> dict[str, float]:
        use = self._engine.cache_use
        return {
            **self._counts,
            "open": len(self._episodes),
            "waiting": sum(not episode.sampling for episode in self._episodes.values()),
            "prompt_tokens": use.num_prompt_tokens,
            "cached_tokens": use.num_cached_tokens,
            "worker_restarts": self._workers.num_restarts,
        }

    def _play(self, member: GroupMember) -> None:
        of_lease = self._leases[member.lease_id]
        now = self._clock()
        episode = Episode(member, of_lease.num_begun[member.number], of_lease.prompt_token_ids, now, now)
        of_lease.num_begun[member.number] += 1
        self._episodes[episode.name] = episode
        self._counts["begun"] += 1
        lease = of_lease.lease
        message = messages.PlayEpisode(
            episode=episode.name,
            row=lease.row,
            prompt=lease.prompt,
            num_prompt_tokens=len(of_lease.prompt_token_ids),
            prompt_digest=messages.digest_of(of_lease.prompt_token_ids),
            max_new_tokens=lease.sampling.max_new_tokens,
            seed=lease.lease_id,
            is_evaluation=lease.is_evaluation,
        )
        self._workers.play(episode.name, message)

    def _handle(self, message: messages.OfEpisode) -> None:
        if isinstance(message, messages.Ended | messages.Failed):
            self._workers.end(message.episode)
            if (closing := self._closing.pop(message.episode, None)) is not None:
                self._note_closed(closing)
        episode = self._episodes.get(message.episode)
        # Those that are being closed are off the books.
        if episode is None:
            return
        match message:
            case messages.SampleTurn():
                self._sample(episode, message)
            case messages.Withdraw():
                self._withdraw(episode, message)
            case messages.Ended():
                self._end(episode, message)
            case messages.Failed():
                self._fail_or_put_off(episode, message)
            case _:
                assert_never(message)

    def _sample(self, episode: Episode, message: messages.SampleTurn) -> None:
        number = len(episode.turns)
        continues = number - message.back if message.back else None
        if number == MAX_TURNS or not episode.can_continue(continues):
            flaw = f"more than {MAX_TURNS} turns" if number == MAX_TURNS else "a turn that continues one which is not there"
            self._fail(episode.member.lease_id, "environment_error", f"an episode has {flaw}")
            return
        prompt = [*episode.tokens_before(continues), *message.context]
        room_of_all = max_episode_tokens(self._config) - episode.num_tokens - len(message.context)
        room = min(self._config.model.max_length - len(prompt), room_of_all)
        if room < 1 or not prompt:
            flaw = "more tokens than fit" if prompt else "a sequence that begins with nothing"
            self._fail(episode.member.lease_id, "environment_error", f"an episode has {flaw}")
            return
        if not episode.sampling:
            self._end_turn_of_function(episode)
        of_lease = self._leases[episode.member.lease_id]
        sampling = of_lease.lease.sampling
        longest = min(sampling.max_new_tokens, message.max_new_tokens, room)
        request = episode.ask(EpisodeTurn(continues, message.context, longest))
        self._requests[request] = episode, number
        if self._config.actor.on_update == "keep_kv" and of_lease.cached_at is None:
            of_lease.cached_at = self._engine.num_loads
        sampling = msgspec.structs.replace(sampling, max_new_tokens=longest)
        self._engine.submit([request], prompt, sampling, cached_at=of_lease.cached_at)

    def _withdraw(self, episode: Episode, message: messages.Withdraw) -> None:
        episode.withdraw(message.turn)
        if self._requests.pop(request := episode.request(message.turn), None) is not None:
            self._engine.abort([request])
            episode.turn_started_at = self._clock()

    def _end(self, episode: Episode, message: messages.Ended) -> None:
        if message.is_out_of_room:
            episode.finish_reason = "length"
        if not episode.sampling:
            self._end_turn_of_function(episode)
        completion = episode.completion(message.turn_rewards, message.branch_rewards)
        if completion is None:
            self._fail(episode.member.lease_id, "environment_error", "the function has returned without a sample()")
            return
        # Turns that were asked for, and not waited for.
        self._forget(episode)
        self._counts["ended"] += 1
        of_lease = self._leases[episode.member.lease_id]
        self.retries.succeed(episode.member, self._clock())
        of_lease.ended[episode.member.number] = completion, Reward(message.reward, dict(message.parts))
        if len(of_lease.ended) == of_lease.lease.group_size:
            del self._leases[episode.member.lease_id]
            in_order = [of_lease.ended[index] for index in range(of_lease.lease.group_size)]
            completions, rewards = zip(*in_order, strict=True)
            self._outcomes.append(
                RewardedGroup(episode.member.lease_id, completions, rewards, self._clock() - of_lease.began_at)
            )

    def _fail_or_put_off(self, episode: Episode, message: messages.Failed) -> None:
        if not message.is_transient:
            self.retries.show_mistake(message.traceback)
            self._fail(episode.member.lease_id, "environment_error", message.detail)
            return
        self._forget(episode)
        self._counts["again_unavailable"] += 1
        now = self._clock()
        failures = self.retries.fail(episode.member, message.detail, now)
        if failures.again_at is None:
            num_begun = self._leases[episode.member.lease_id].num_begun[episode.member.number]
            detail = f"{message.detail}; played {num_begun} times in {now - failures.since:.0f} s"
            self._fail(episode.member.lease_id, "environment_unavailable", detail)

    def _take_death(self, name: str, *, is_blamed: bool = True) -> None:
        """Take note that the process of an episode is gone; not `is_blamed` if another of its episodes was the cause."""
        closing = self._closing.pop(name, None)
        episode = self._episodes.get(name)
        if closing is not None:
            self._note_closed(closing)
        elif episode is not None:
            self._forget(episode)
            if is_blamed:
                self._play_again(episode.member, "environment_unavailable", "its worker has died")
            else:
                self._counts["again_lost"] += 1
                self._play(episode.member)

    def _note_closed(self, closing: _Closing) -> None:
        if closing.late is not None and closing.late.lease_id in self._leases:
            self._play_again(closing.late, "environment_timeout", closing.detail)

    def _play_again(self, member: GroupMember, reason: str, detail: str) -> None:
        """Begin an episode anew; fail its lease when it was begun too often."""
        self._counts["again_timeout" if reason == "environment_timeout" else "again_lost"] += 1
        of_lease = self._leases[member.lease_id]
        of_lease.num_lost[member.number] += 1
        if of_lease.num_lost[member.number] <= self._limits.max_retries:
            self._play(member)
        else:
            self._fail(member.lease_id, reason, f"{detail}; played {of_lease.num_begun[member.number]} times")

    def _fail(self, lease_id: int, reason: str, detail: str) -> None:
        self.cancel(lease_id)
        self._outcomes.append(SamplingFailure(lease_id, reason, detail))

    def _end_turn_of_function(self, episode: Episode) -> None:
        """Add the time since the function had the word last."""
        seconds = self._clock() - episode.turn_started_at
        episode.environment_s += seconds
        self._counts["seconds"] += seconds

    def _forget(self, episode: Episode) -> None:
        """Take an episode and its turns off the books."""
        self._episodes.pop(episode.name, None)
        requests = [episode.request(number) for number in sorted(episode.sampling)]
        for request in requests:
            self._requests.pop(request, None)
        if requests:
            self._engine.abort(requests)

    def _close(self, episode: Episode, closing: _Closing) -> None:
        """Ask the worker of an episode to end it."""
        self._forget(episode)
        self._counts["cancelled"] += 1
        self._closing[episode.name] = closing
        self._workers.send(episode.name, messages.CancelEpisode(episode=episode.name))

    def _end_late_episodes(self) -> None:
        now = self._clock()
        for name in self._workers.not_begun():
            # The time that a process takes to start is nobody's turn.
            if name in self._episodes:
                self._episodes[name].started_at = self._episodes[name].turn_started_at = now
            elif name in self._closing:
                self._closing[name] = self._closing[name]._replace(since=now)
        for episode in list(self._episodes.values()):
            of_turn = not episode.sampling and now > episode.turn_started_at + self._limits.turn_timeout_s
            if of_turn or now > episode.started_at + self._limits.episode_timeout_s:
                setting = "turn_timeout_s" if of_turn else "episode_timeout_s"
                # Played again when it has ended: its worker may be blocked, and would hold the next attempt too.
                self._close(episode, _Closing(now, episode.member, f"it took longer than environment.{setting}"))
        for name, closing in list(self._closing.items()):
            if name in self._closing and now > closing.since + CLOSE_TIMEOUT_S:
                self._replace_worker_of(name)

    def _replace_worker_of(self, name: str) -> None:
        for other in self._workers.kill_worker_of(name, f"an episode did not end within {CLOSE_TIMEOUT_S:g} s"):
            self._take_death(other, is_blamed=False)
        self._closing.pop(name, None)
