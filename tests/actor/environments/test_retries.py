"""Attempts at episodes are put off, begun again when they are due, and forgotten with their episode."""

from offbeat.actor.environments.retries import Member, Retries

EPISODE = Member(7, 0)


def test_episode_that_was_put_off_begins_again_once() -> None:
    retries = Retries(max_lost=1, retry_s=60.0)
    retries.begin(EPISODE)
    assert retries.put_off(EPISODE, "the tool is down", now=0.0) is None
    assert retries.take_due(100.0) == [EPISODE]
    assert retries.take_due(200.0) == []


def test_episode_that_ended_while_it_was_put_off_is_not_begun_again() -> None:
    retries = Retries(max_lost=1, retry_s=60.0)
    retries.begin(EPISODE)
    retries.put_off(EPISODE, "the tool is down", now=0.0)
    retries.end(EPISODE)
    assert retries.take_due(100.0) == []
