"""M2PO keeps the ratio of kept tokens, and drops the largest of a whole batch; test_losses.py has it among all losses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.learner.objectives.losses import m2po, m2po_candidates, m2po_cutoff
from tests.learner.objectives.loss_cases import inputs_of, one_token, random_batch, run


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # (log r)^2: 0.48 of 2, 0.16 of 1.5. The cutoff is 0.25.
        (2.0, 3.0, 0.0, 0.0),  # dropped
        (1.5, 3.0, -4.5, -4.5),  # kept with its whole ratio, far outside of any band
        (0.5, -3.0, 0.0, 0.0),  # dropped
        (0.75, -3.0, 2.25, 2.25),
        (2.0, -3.0, 6.0, 6.0),  # not a candidate: the advantage pulls it back
        (0.5, 3.0, -1.5, -1.5),
    ],
)
def test_m2po_keeps_the_ratio_of_kept_tokens_and_drops_candidates_from_the_cutoff_on(ratio, advantage, loss, gradient):
    losses, clipped, policy_gradient = run(
        lambda *tensors: m2po(inputs_of(*tensors), cutoff=0.25), one_token(math.log(ratio), advantage)
    )
    assert losses.item() == pytest.approx(loss)
    assert policy_gradient.item() == pytest.approx(gradient)
    assert clipped.item() == (gradient == 0)


def test_m2po_candidates_are_the_tokens_that_a_clip_could_act_on():
    log_rho = torch.tensor([[0.1, -0.2, 0.3, 0.4], [0.5, -0.6, 0.0, math.nan]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, 0.0, 1.0], [-1.0, -1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, True, True, False]]).expand(2, 4)
    squares = m2po_candidates(log_rho, mask, advantages)
    torch.testing.assert_close(squares, torch.tensor([0.1**2, 0.6**2]))
    assert not squares.requires_grad


@pytest.mark.parametrize(
    ("squares", "threshold", "cutoff"),
    [
        ([0.04, 0.01, 0.09, 0.25], 0.05, 0.25),  # means of the smallest: 0.01, 0.025, 0.0467, 0.0975
        ([0.04, 0.01, 0.09, 0.25], 0.04, 0.09),
        ([0.04, 0.01], 0.04, math.inf),
        ([0.09, 0.06], 0.04, 0.06),
        ([], 0.04, math.inf),
    ],
)
def test_m2po_cutoff_is_the_smallest_square_that_must_go(squares, threshold, cutoff):
    assert m2po_cutoff(torch.tensor(squares), threshold=threshold) == pytest.approx(cutoff)


@settings(deadline=None, max_examples=60)
@given(
    squares=st.lists(st.sampled_from([0.0, 0.01, 0.03, 0.04, 0.05, 0.1, 4.0]), max_size=12),
    threshold=st.sampled_from([0.005, 0.035, 0.2]),
)
def test_m2po_keeps_as_much_as_the_threshold_allows_up_to_equals(squares, threshold):
    """Compare with the paper's loop, which drops the largest until the mean of the rest is within the threshold."""
    kept = sorted(squares)
    while kept and sum(kept) / len(kept) > threshold:
        largest = kept[-1]
        kept = [square for square in kept if square < largest]
    cutoff = m2po_cutoff(torch.tensor(squares, dtype=torch.float64), threshold=threshold)
    assert sorted(square for square in squares if square < cutoff) == kept


def test_m2po_of_a_whole_batch_holds_the_second_moment_of_its_candidates():
    """Collected in two micro-batches, applied in one: the cutoff is global."""
    batch = random_batch(0, rows=32, tokens=16)
    log_ratio = batch.policy_logprobs - batch.anchor_logprobs
    candidates = [
        m2po_candidates(log_ratio[part], batch.completion_mask[part], batch.advantages[part])
        for part in (slice(0, 9), slice(9, 32))
    ]
    cutoff = m2po_cutoff(torch.cat(candidates), threshold=0.04)
    _, dropped, _ = run(lambda *tensors: m2po(inputs_of(*tensors), cutoff=cutoff), batch)
    kept = m2po_candidates(log_ratio, batch.completion_mask & ~dropped, batch.advantages)
    assert 0 < int(dropped.sum()) == len(torch.cat(candidates)) - len(kept)
    assert 0.038 < kept.mean().item() <= 0.04
