"""Episodes become completions of exactly the tokens that were read and sampled; failures are played again or fail the lease."""

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.actor.engines.engine import Completion
from offbeat.actor.environments.episodes import Episodes
from offbeat.actor.environments.messages import (
    CancelEpisode,
    Ended,
    Failed,
    FromWorker,
    PlayEpisode,
    SampleTurn,
    ToWorker,
    TurnSampled,
    Withdraw,
)
from offbeat.actor.environments.workers import Workers
from offbeat.actor.leases_at_work import as_group
from offbeat.actor.rewards.failures import SamplingFailure
from offbeat.actor.sampling import RewardedGroup
from offbeat.common.settings.loading import load
from offbeat.learner.leases.groups import unpack
from offbeat.protocols.messages import Lease, Sampling
from offbeat.protocols.payload import Segment, Turn
from offbeat.protocols.wire import decode_from_actor, encode
from tests.actor.actor_harness import FakeEngine
from tests.trees import read_by_turns, trees_of_turns

MAX_RETRIES = 2
LIMITS = ("turn_timeout_s=10", "episode_timeout_s=50", f"environment.max_retries={MAX_RETRIES}", "reward_retry_s=60")
PROMPT = [1, 2]


class FakeWorkers:
    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.arrived: list[FromWorker | str] = []
        self.killed: list[str] = []
        self.ended: list[str] = []
        self.starting: set[str] = set()
        self.num_restarts = 0

    def not_begun(self) -> set[str]:
        return self.starting

    def play(self, episode: str, message: PlayEpisode) -> None:
        assert message.episode == episode
        self.sent.append(message)

    def send(self, episode: str, message: ToWorker) -> None:
        self.sent.append(message)

    def end(self, episode: str) -> None:
        self.ended.append(episode)

    def kill_worker_of(self, episode: str, reason: str) -> list[str]:
        self.killed.append(episode)
        return [name for name in self.open() if name not in self.ended]

    def open(self) -> list[str]:
        return [one.episode for one in self.sent if isinstance(one, PlayEpisode)]

    def poll(self) -> Iterator[FromWorker | str]:
        arrived, self.arrived = self.arrived, []
        yield from arrived


class Game:
    """Episodes with an engine and workers that the test moves by hand."""

    def __init__(
        self, group_size: int = 1, max_length: int = 100, max_episode_tokens: int = 200, *, keeps_kv: bool = True
    ) -> None:
        self.engine, self.workers, self.now = FakeEngine(), FakeWorkers(), 0.0
        self.engine.num_loads = 3
        settings = [
            *LIMITS,
            f"model.max_length={max_length}",
            f"train.micro_batch_tokens={max_episode_tokens}",
            f"actor.on_update={'keep_kv' if keeps_kv else 'recompute_kv'}",
        ]
        self.episodes = Episodes(self.engine, cast(Workers, self.workers), load(None, settings), lambda: self.now)
        self.begin(7, group_size)

    def begin(self, lease_id: int, group_size: int = 1) -> None:
        lease = Lease(
            lease_id=lease_id, prompt_id=3, group_size=group_size, sampling=Sampling(8), min_policy_version=0, timeout_s=60.0,
            prompt="a:", row='{"answer": "2"}',
        )  # fmt: skip
        self.episodes.begin(lease, PROMPT)

    def poll(self, *messages: FromWorker | str) -> list[Any]:
        self.workers.arrived += messages
        return self.episodes.poll()

    def sampled(self, episode: str, turn: int, ids: list[int], versions: tuple[tuple[int, int], ...] = ((0, 0),)) -> None:
        segments = tuple(Segment(*segment) for segment in versions)
        logprobs = -np.array(ids, dtype=np.float32)
        completion = Completion(f"{episode}/{turn}", np.array(ids, dtype=np.int32), logprobs, "stop", segments)
        self.episodes.add(completion)


def sample(episode: str, *context: int, longest: int = 8, back: int = 1) -> SampleTurn:
    return SampleTurn(episode=episode, back=back, context=list(context), max_new_tokens=longest)


def ended(episode: str, reward: float = 1.0, **parts: float) -> Ended:
    return Ended(episode=episode, reward=reward, parts=parts, is_out_of_room=False)


def down(episode: str) -> Failed:
    return Failed(episode=episode, is_transient=True, detail="judge down")


def test_next_turn_reads_the_tokens_so_far_and_the_context() -> None:
    game = Game()
    game.poll(sample("7/0/0"))
    game.sampled("7/0/0", 1, [5, 6], ((3, 0),))
    assert game.workers.sent[-1] == TurnSampled(episode="7/0/0", turn=0, token_ids=[5, 6], finish_reason="stop")
    game.poll(sample("7/0/0", 9, 9, longest=3))
    assert game.engine.submitted["7/0/0/1"] == (PROMPT, Sampling(8))
    assert game.engine.submitted["7/0/0/2"] == ([*PROMPT, 5, 6, 9, 9], Sampling(3))
    game.sampled("7/0/0", 2, [7, 8, 4], ((3, 0), (4, 2)))
    (played,) = game.poll(ended("7/0/0", 0.5, turns=2.0))
    assert isinstance(played, RewardedGroup)
    (completion,) = played.completions
    assert completion.token_ids.tolist() == [5, 6, 7, 8, 4]
    assert completion.context_ids.tolist() == [9, 9]
    assert [(turn.num_context, turn.num_sampled) for turn in completion.turns] == [(0, 2), (2, 3)]
    # One version over two turns is one segment; the next began at the fifth sampled token.
    assert completion.segments == (Segment(3, 0), Segment(4, 4))
    assert completion.behavior_logprobs.tolist() == [-5, -6, -7, -8, -4]
    assert (played.rewards[0].total, played.rewards[0].parts) == (0.5, {"turns": 2.0})


@given(st.lists(trees_of_turns(max_turns=5), min_size=1, max_size=3), st.data())
def test_learner_reads_what_the_engine_saw_in_whatever_order_turns_end(group: list[tuple[Turn, ...]], data: Any) -> None:
    game = Game(group_size=len(group))
    outcomes: list[Any] = []
    for index, turns in enumerate(group):
        name, waiting = f"7/{index}/0", set[int]()
        tokens = [[100 * number + place for place in range(turn.num_sampled)] for number, turn in enumerate(turns)]
        for number, turn in enumerate(turns):
            # What the turn continues has ended; others may still be sampled beside it.
            needed = {number - turn.back} & waiting if turn.back else set()
            for ends in data.draw(st.permutations(sorted(waiting)))[: data.draw(st.integers(0, len(waiting)))] + sorted(needed):
                if ends in waiting:
                    waiting.remove(ends)
                    game.sampled(name, ends + 1, tokens[ends])
            game.poll(sample(name, *range(10 * number, 10 * number + turn.num_context), back=turn.back))
            waiting.add(number)
        for ends in data.draw(st.permutations(sorted(waiting))):
            game.sampled(name, ends + 1, tokens[ends])
        outcomes += game.poll(ended(name))
    message, arrays = as_group(outcomes[0])
    decoded = decode_from_actor(encode(message, *arrays))
    for index, (rollout, turns) in enumerate(zip(unpack(message.completions, decoded.arrays), group, strict=True)):
        asked = [prompt for name, (prompt, _) in game.engine.submitted.items() if name.startswith(f"7/{index}/")]
        # A turn that has read nothing but the prompt needs no place.
        told = rollout.turns or (Turn(0, len(rollout.token_ids)),)
        reads = read_by_turns(PROMPT, told, rollout.context_ids, rollout.token_ids)
        assert [read for read, _ in reads] == asked
        assert told == turns
        assert [token for _, sampled in reads for token in sampled] == rollout.token_ids.tolist()
        assert rollout.behavior_logprobs.tolist() == [-float(token) for token in rollout.token_ids.tolist()]


@pytest.mark.parametrize(("back", "why"), [(1, "withdrawn"), (2, "being sampled"), (5, "before the prompt")])
def test_turn_that_continues_one_without_tokens_is_a_mistake(back: int, why: str) -> None:
    game = Game()
    game.poll(sample("7/0/0"), sample("7/0/0", back=2), sample("7/0/0", back=3))
    game.sampled("7/0/0", 1, [5])
    game.sampled("7/0/0", 3, [6])
    assert game.poll(Withdraw(episode="7/0/0", turn=2)) == []
    (failed,) = game.poll(sample("7/0/0", back=back))
    assert failed.detail == "an episode has a turn that continues one which is not there", why


def test_unanswered_turns_are_left_out_of_the_completion() -> None:
    game = Game()
    game.poll(sample("7/0/0"), sample("7/0/0", 8, back=2), sample("7/0/0", 3, back=0))
    game.sampled("7/0/0", 3, [6, 6])
    game.sampled("7/0/0", 1, [5])
    game.poll(sample("7/0/0", 9), sample("7/0/0", 2, back=4))
    game.sampled("7/0/0", 5, [4])
    game.sampled("7/0/0", 4, [7])
    (played,) = game.poll(Withdraw(episode="7/0/0", turn=0), ended("7/0/0"))
    assert game.engine.aborted == ["7/0/0/2"]
    (completion,) = played.completions
    # The first turn stays: the last one continues it.
    assert completion.turns == (Turn(0, 1), Turn(1, 2, 0), Turn(1, 1), Turn(1, 1, 3))
    assert completion.token_ids.tolist() == [5, 6, 6, 7, 4]
    assert completion.context_ids.tolist() == [3, 9, 2]


def test_reward_of_a_turn_without_tokens_goes_to_the_turn_before_it() -> None:
    game = Game()
    game.poll(sample("7/0/0"), sample("7/0/0", 8, back=2), sample("7/0/0", 9, back=3), sample("7/0/0", 3, back=0))
    game.sampled("7/0/0", 2, [4])
    game.sampled("7/0/0", 1, [5])
    game.poll(Withdraw(episode="7/0/0", turn=1))
    game.sampled("7/0/0", 3, [6])
    rewards = {0: 0.5, 1: 0.25, 2: 2.0, 3: 4.0}
    branch_rewards = {0: 0.5, 2: 0.25}
    (played,) = game.poll(msgspec.structs.replace(ended("7/0/0", 9.0), turn_rewards=rewards, branch_rewards=branch_rewards))
    (completion,) = played.completions
    assert completion.turns == (Turn(0, 1, 1, 0.75, 0.5), Turn(1, 1, 2, 6.0, 0.25))
    assert [reward.total for reward in played.rewards] == [9.0]


def test_all_sequences_of_an_episode_have_room_together() -> None:
    game = Game(max_length=20, max_episode_tokens=22)
    # The prompt has 2 tokens; while both are sampled, either may get all that it asked for.
    game.poll(sample("7/0/0", longest=8), sample("7/0/0", 9, back=2, longest=8))
    assert [sampling.max_new_tokens for _, sampling in game.engine.submitted.values()] == [8, 8]
    game.sampled("7/0/0", 1, [5])
    game.poll(sample("7/0/0", 3, back=0, longest=20))
    assert game.engine.submitted["7/0/0/3"] == ([3], Sampling(8))
    (failure,) = game.poll(sample("7/0/0", 4, 4, back=0))
    assert failure.detail == "an episode has more tokens than fit"


def test_sequence_of_no_tokens_is_a_mistake() -> None:
    (failure,) = Game().poll(sample("7/0/0", back=0))
    assert (failure.reason, failure.detail) == ("environment_error", "an episode has a sequence that begins with nothing")


def test_function_has_the_word_when_no_turn_is_sampled_any_more() -> None:
    game = Game()
    game.poll(sample("7/0/0"), sample("7/0/0", back=2))
    game.sampled("7/0/0", 1, [5])
    game.now = 20.0
    game.poll()
    assert game.workers.killed == [] and CancelEpisode(episode="7/0/0") not in game.workers.sent
    game.poll(Withdraw(episode="7/0/0", turn=1))
    game.now = 30.5
    game.poll()
    assert CancelEpisode(episode="7/0/0") in game.workers.sent


@pytest.mark.parametrize(("keeps_kv", "expected"), [(True, 3), (False, None)])
def test_all_turns_of_a_group_share_the_cache_of_its_first_weights_unless_keys_are_recomputed(
    keeps_kv: bool, expected: int | None
) -> None:
    game = Game(group_size=2, keeps_kv=keeps_kv)
    game.poll(sample("7/0/0"))
    game.engine.num_loads = 4
    game.sampled("7/0/0", 1, [5])
    game.poll(sample("7/0/0"), sample("7/1/0"))
    assert game.engine.cached_at == dict.fromkeys(("7/0/0/1", "7/0/0/2", "7/1/0/1"), expected)


def test_group_waits_for_all_its_episodes() -> None:
    game = Game(group_size=2)
    for name in ("7/1/0", "7/0/0"):
        assert game.poll(sample(name)) == []
        game.sampled(name, 1, [4])
    assert game.poll(ended("7/1/0", 0.25)) == []
    (played,) = game.poll(ended("7/0/0", 0.75))
    assert [reward.total for reward in played.rewards] == [0.75, 0.25]
    assert not game.episodes.is_waiting


def test_episode_of_a_dead_process_is_played_again_from_its_prompt() -> None:
    game = Game()
    game.poll(sample("7/0/0", 9))
    assert game.poll("7/0/0") == []
    assert game.engine.aborted == ["7/0/0/1"]
    game.sampled("7/0/0", 1, [5])
    game.poll(sample("7/0/1"))
    assert game.engine.submitted["7/0/1/1"][0] == PROMPT
    game.sampled("7/0/1", 1, [6])
    (played,) = game.poll(ended("7/0/0"), ended("7/0/1"))
    assert played.completions[0].token_ids.tolist() == [6]


def test_episodes_whose_processes_all_die_fail_their_lease_and_are_no_zero() -> None:
    game = Game(group_size=2)
    outcomes = [outcome for attempt in range(3) for outcome in game.poll(f"7/0/{attempt}")]
    assert outcomes == [SamplingFailure(7, "environment_unavailable", "its worker has died; played 3 times")]
    assert CancelEpisode(episode="7/1/0") in game.workers.sent
    assert not game.episodes.is_waiting


def test_episode_whose_tool_is_down_keeps_its_place_and_is_played_again_when_it_may_be_back() -> None:
    game = Game()
    game.poll(sample("7/0/0"))
    for attempt in range(4):
        assert game.poll(down(f"7/0/{attempt}")) == []
        assert game.engine.aborted == ["7/0/0/1"]
        plays = len(game.workers.sent)
        assert game.poll() == []
        assert len(game.workers.sent) == plays, "not at once"
        game.now += 8
        game.poll()
    trouble = game.episodes.retries.trouble(game.now)
    assert trouble is not None
    assert (trouble.waiting_s, trouble.problem, trouble.lease_ids) == (game.now, "judge down", (7,))
    game.poll(sample("7/0/4"))
    game.sampled("7/0/4", 1, [6])
    (played,) = game.poll(ended("7/0/4"))
    assert isinstance(played, RewardedGroup)
    assert game.episodes.retries.trouble(game.now) is None


def test_while_most_episodes_fail_one_is_tried_now_and_then() -> None:
    game = Game(group_size=6)
    for index in range(6):
        game.poll(down(f"7/{index}/0"))
    assert game.episodes.retries.is_failing
    plays = len(game.workers.sent)
    for _ in range(3):
        game.now += 5
        game.poll()
        game.poll()
    assert [play.episode for play in game.workers.sent[plays:] if isinstance(play, PlayEpisode)] == ["7/0/1", "7/1/1", "7/2/1"]
    game.poll(sample("7/0/1"))
    game.sampled("7/0/1", 1, [6])
    game.poll(ended("7/0/1"))
    assert not game.episodes.retries.is_failing
    game.poll()
    assert len(game.workers.sent) == plays + 3 + 1 + 3, "the turn, and the three that waited"


def test_tool_that_stays_down_fails_the_lease_and_is_no_zero() -> None:
    game = Game(group_size=2)
    game.poll(sample("7/1/0"))
    assert game.poll(down("7/0/0")) == []
    game.now = 30
    game.poll()
    assert game.poll(down("7/0/1")) == []
    game.now = 60.1
    game.poll()
    (failure,) = game.poll(down("7/0/2"))
    assert failure == SamplingFailure(7, "environment_unavailable", "judge down; played 3 times in 60 s")
    assert game.poll() == []
    assert game.episodes.retries.trouble(game.now) is None
    assert not game.episodes.is_waiting


def test_start_of_a_process_is_nobodys_turn() -> None:
    game = Game()
    game.workers.starting = {"7/0/0"}
    for game.now in (0.0, 45.0, 90.0):
        game.poll()
    game.workers.starting = set()
    game.now = 99.0
    game.poll()
    assert not any(isinstance(message, CancelEpisode) for message in game.workers.sent)
    game.now = 100.5
    game.poll()
    assert CancelEpisode(episode="7/0/0") in game.workers.sent


def test_mistake_fails_the_lease_at_once() -> None:
    game = Game()
    failed = Failed(episode="7/0/0", is_transient=False, detail="KeyError: 'answer' (my_task.py:3)")
    assert game.poll(failed) == [SamplingFailure(7, "environment_error", "KeyError: 'answer' (my_task.py:3)")]


def test_function_that_never_samples_has_a_mistake() -> None:
    (failure,) = Game().poll(ended("7/0/0"))
    assert (failure.reason, failure.detail) == ("environment_error", "the function has returned without a sample()")


def test_function_that_takes_too_long_is_cancelled_and_played_again_once_it_has_ended() -> None:
    game = Game()
    game.now = 10.5
    assert game.poll() == []
    assert game.workers.sent[-1] == CancelEpisode(episode="7/0/0")
    game.poll(Failed(episode="7/0/0", is_transient=True, detail="cancelled"))
    game.poll(sample("7/0/1"))
    game.sampled("7/0/1", 1, [6])
    (played,) = game.poll(ended("7/0/1"))
    assert isinstance(played, RewardedGroup)


def test_process_of_a_function_that_goes_on_is_killed_and_its_episodes_count_once_for_it() -> None:
    game = Game(group_size=3)
    game.poll(sample("7/2/0"))
    for attempt in range(2):
        game.now += 10.5
        game.poll()
        game.workers.killed.clear()
        game.now += 10.1
        game.poll()
        assert set(game.workers.killed) <= {f"7/{index}/{attempt}" for index in range(3)}
        begun = [one.episode for one in game.workers.sent if isinstance(one, PlayEpisode)]
        assert begun[-3:] == [f"7/{index}/{attempt + 1}" for index in range(3)]
    game.now += 15.6
    game.poll()
    game.now += 15.6
    (failure,) = game.poll()
    assert failure == SamplingFailure(
        7, "environment_timeout", "it took longer than environment.turn_timeout_s; played 3 times"
    )


def test_episode_whose_process_is_replaced_for_another_keeps_its_tries() -> None:
    game = Game()
    for attempt in range(2 * MAX_RETRIES):
        game.poll(sample(f"7/0/{attempt}"))
        game.begin(100 + attempt)
        game.now += 10.5
        assert game.poll() == []
        game.now += 10.1
        assert game.poll() == []
        assert game.workers.killed == [f"{100 + number}/0/0" for number in range(attempt + 1)]
        # The one to blame is played again too, and ends well.
        game.poll(sample(f"{100 + attempt}/0/1"))
        game.sampled(f"{100 + attempt}/0/1", 1, [6])
        assert len(game.poll(ended(f"{100 + attempt}/0/1"))) == 1
        game.workers.end(f"{100 + attempt}/0/1")
    assert game.workers.open()[-2:] == [f"7/0/{2 * MAX_RETRIES}", f"{99 + 2 * MAX_RETRIES}/0/1"]


def test_time_in_the_engine_is_not_the_functions() -> None:
    game = Game()
    game.poll(sample("7/0/0"))
    game.now = 40.0
    game.poll()
    assert game.workers.killed == []
    assert "7/0/0/1" not in game.engine.aborted
    game.now = 50.5
    game.poll()
    assert game.engine.aborted == ["7/0/0/1"]


def test_cancelled_lease_answers_nothing_whatever_still_arrives() -> None:
    game = Game()
    game.poll(sample("7/0/0"))
    game.episodes.cancel(7)
    assert game.engine.aborted == ["7/0/0/1"]
    game.sampled("7/0/0", 1, [5])
    assert game.poll(ended("7/0/0"), sample("7/0/0")) == []
    assert list(game.engine.submitted) == ["7/0/0/1"]


def test_cancelled_lease_whose_episode_was_put_off_is_not_played_again() -> None:
    game = Game(group_size=2)
    assert game.poll(down("7/1/0")) == []
    assert game.episodes.retries.trouble(game.now) is not None
    game.episodes.cancel(7)
    assert game.episodes.retries.trouble(game.now) is None
    num_sent = len(game.workers.sent)
    game.now = 100
    assert game.poll() == []
    assert len(game.workers.sent) == num_sent


def test_lease_that_is_over_ends_its_episodes_in_the_middle_of_a_tool_call_and_nothing_is_played_again() -> None:
    game = Game()
    game.poll(sample("7/0/0"))
    game.sampled("7/0/0", 1, [5])
    game.episodes.cancel(7)
    assert game.workers.sent[-1] == CancelEpisode(episode="7/0/0")
    num_sent = len(game.workers.sent)
    assert game.poll(Failed(episode="7/0/0", is_transient=True, detail="cancelled")) == []
    game.now = 100
    assert game.poll() == []
    assert (len(game.workers.sent), game.workers.killed) == (num_sent, [])


def test_turns_attempts_and_time_of_the_environment_are_counted() -> None:
    game = Game(group_size=2)
    game.now = 1.0
    game.poll(sample("7/0/0"))
    game.now = 3.0
    game.sampled("7/0/0", 1, [5])
    game.now = 7.0
    assert (game.episodes.counts()["open"], game.episodes.counts()["waiting"]) == (2, 2)
    game.poll("7/1/0", ended("7/0/0"))
    game.poll(down("7/1/1"))
    game.now = 20.0
    game.poll()
    game.poll(sample("7/1/2"))
    game.now = 60.0
    game.sampled("7/1/2", 1, [5])
    (played,) = game.poll(ended("7/1/2"))
    assert [completion.environment_s for completion in played.completions] == [5.0, 0.0]
    counts = {name: number for name, number in game.episodes.counts().items() if number}
    expected = {"begun": 4, "ended": 2, "turns": 2, "seconds": 5.0, "again_lost": 1, "again_unavailable": 1}
    assert counts == expected


def test_worker_that_sends_more_than_fits_has_a_mistake() -> None:
    game = Game(max_length=5)
    (failure,) = game.poll(sample("7/0/0", 9, 9, 9))
    assert (failure.reason, failure.detail) == ("environment_error", "an episode has more tokens than fit")


def test_turn_is_bounded_by_the_room_that_is_left() -> None:
    game = Game(max_length=6)
    game.poll(sample("7/0/0", 9))
    assert game.engine.submitted["7/0/0/1"][1] == Sampling(3)


def test_episode_that_ends_for_want_of_room_is_cut() -> None:
    game = Game()
    game.poll(sample("7/0/0"))
    game.sampled("7/0/0", 1, [5])
    (played,) = game.poll(Ended(episode="7/0/0", reward=0.0, parts={}, is_out_of_room=True))
    assert played.completions[0].finish_reason == "length"
    assert played.completions[0].turns == (), "all of it was sampled"
