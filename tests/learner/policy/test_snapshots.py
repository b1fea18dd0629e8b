"""Who writes what of a snapshot. That the bytes are right: tests/learner/training/test_trainer.py, on two real ranks."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.learner.policy.networks import _Ranks


@given(st.lists(st.booleans(), max_size=16))
def test_every_rank_is_written_by_itself_or_received_by_one_writer(others: list[bool]) -> None:
    has_buffer = [True, *others]
    writers = [rank for rank, has in enumerate(has_buffer) if has]
    ranks = [_Ranks(own, writers, len(has_buffer)) for own in range(len(has_buffer))]
    written = sorted(rank for own in writers for rank in [own, *ranks[own].senders()])
    assert written == list(range(len(has_buffer)))
    for of_rank in ranks:
        if of_rank.own not in writers:
            assert not of_rank.senders()
            assert of_rank.own in ranks[of_rank.writer_of(of_rank.own)].senders()
    shares = [len(ranks[own].senders()) for own in writers]
    assert max(shares) - min(shares) <= 1, "writers receive alike"
