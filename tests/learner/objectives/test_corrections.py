import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.learner.objectives.corrections import (
    geometric_mask,
    geometric_tis,
    icepop,
    k2_mask,
    k3_mask,
    opsm,
    segment_mask,
    sequence_mask,
    sequence_tis,
    token_tis,
)
from offbeat.learner.objectives.losses import LOG_RATIO_BOUND

MASK = torch.tensor([[True, True, True, False]])


def log_of(*ratios: float) -> torch.Tensor:
    return torch.tensor([*ratios], dtype=torch.float32).log()[None]


def every_correction(log_rho, mask, advantages, turns):
    return {
        "token_tis": token_tis(log_rho, mask, low=0.5, high=2.0),
        "geometric_tis": geometric_tis(log_rho, mask, low=0.9, high=1.1),
        "sequence_tis": sequence_tis(log_rho, mask, low=0.3, high=2.0),
        "icepop": icepop(log_rho, mask, low=0.5, high=5.0),
        "sequence_mask": sequence_mask(log_rho, mask, low=0.0, high=3.0),
        "geometric_mask": geometric_mask(log_rho, mask, low=0.9, high=1.1),
        "segment_mask": segment_mask(log_rho, mask, turns, low=0.9, high=1.1),
        "k2_mask": k2_mask(log_rho, mask, high=0.1),
        "k3_mask": k3_mask(log_rho, mask, high=0.1),
        "opsm": opsm(log_rho, mask, advantages, threshold=0.1),
    }


def test_token_tis_clamps_each_ratio():
    weights = token_tis(log_of(0.25, 1.5, 8.0, 1.0), MASK, low=0.5, high=2.0)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 1.5, 2.0, 0.0]]))
    weights = token_tis(log_of(0.25, 1.5, 8.0, 1.0), MASK, low=0.0, high=2.0)
    torch.testing.assert_close(weights, torch.tensor([[0.25, 1.5, 2.0, 0.0]]))


def test_sequence_tis_truncates_the_product_on_both_sides():
    # 0.5 * 1.5 * 2 = 1.5; 0.5 * 1.5 * 4 = 3; 0.5 * 0.5 * 1 = 0.25.
    for ratios, weight in (((0.5, 1.5, 2.0, 9.0), 1.5), ((0.5, 1.5, 4.0, 9.0), 2.0), ((0.5, 0.5, 1.0, 9.0), 0.4)):
        weights = sequence_tis(log_of(*ratios), MASK, low=0.4, high=2.0)
        torch.testing.assert_close(weights, torch.tensor([[weight] * 3 + [0.0]]))


def test_geometric_tis_truncates_the_root_of_the_product():
    # Cube roots of 8, of 1.331 and of 0.125: 2, 1.1, 0.5.
    for ratios, weight in (((2.0, 4.0, 1.0, 0.1), 1.5), ((1.1, 1.21, 1.0, 9.0), 1.1), ((0.5, 0.25, 1.0, 9.0), 0.8)):
        weights = geometric_tis(log_of(*ratios), MASK, low=0.8, high=1.5)
        torch.testing.assert_close(weights, torch.tensor([[weight] * 3 + [0.0]]))


def test_segment_mask_keeps_and_drops_each_turn_by_its_own_mean():
    # Turns of one, two and one token; roots 1.3, sqrt(0.5 * 2.2) = 1.049, 1.0; what is no loss token is no part.
    log_rho = log_of(1.3, 0.5, 2.2, 1.0, 9.0)
    mask, turns = torch.tensor([[True, True, True, True, False]]), torch.tensor([[0, 1, 1, 2, 0]])
    assert segment_mask(log_rho, mask, turns, low=0.9, high=1.1).tolist() == [[0.0, 1.0, 1.0, 1.0, 0.0]]
    assert segment_mask(log_rho, mask, turns, low=1.01, high=1.3).tolist() == [[1.0, 1.0, 1.0, 0.0, 0.0]]


def test_k2_and_k3_masks_see_noise_that_cancels_in_the_mean():
    # log rho of +-0.4 and 0: k2 = 0.16 / 3 = 0.0533; k3 = (e^0.4 + e^-0.4 - 2) / 3 = 0.05405.
    log_rho = torch.tensor([[0.4, -0.4, 0.0, 7.0]])
    for function, estimate in ((k2_mask, 0.16 / 3), (k3_mask, (math.exp(0.4) + math.exp(-0.4) - 2) / 3)):
        assert function(log_rho, MASK, high=estimate + 1e-4).tolist() == [[1.0, 1.0, 1.0, 0.0]]
        assert function(log_rho, MASK, high=estimate - 1e-4).tolist() == [[0.0] * 4]
    assert geometric_mask(log_rho, MASK, low=0.999, high=1.001).tolist() == [[1.0, 1.0, 1.0, 0.0]]


def test_k3_mask_measures_the_direction_of_verl_and_not_that_of_areal():
    """`seq_mean_k3` of verl, verl/trainer/ppo/rollout_corr_helper.py, has the mean of `rho - 1 - log rho`.

    `kl_k3` of AReaL, areal/utils/functional/functional.py with `KLEstimator` in areal/utils/data.py, has that of
    `1 / rho - 1 + log rho`, and what it keeps has the weight rho.
    """
    log_rho = 0.5 * torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(40, 6, dtype=torch.bool)
    of_verl = [sum(math.exp(value) - 1 - value for value in row) / 6 <= 0.1 for row in log_rho.tolist()]
    of_areal = [sum(math.exp(-value) - 1 + value for value in row) / 6 <= 0.1 for row in log_rho.tolist()]
    assert k3_mask(log_rho, mask, high=0.1)[:, 0].bool().tolist() == of_verl != of_areal
    assert k3_mask(-log_rho, mask, high=0.1)[:, 0].bool().tolist() == of_areal
    assert 0 < sum(of_verl) < 40
    weights = k3_mask(-log_rho, mask, high=0.1) * token_tis(log_rho, mask, low=0.0, high=20.0)
    torch.testing.assert_close(weights, torch.tensor(of_areal)[:, None] * log_rho.exp())


def test_icepop_keeps_the_ratio_inside_the_band_and_drops_it_outside():
    weights = icepop(log_of(0.49, 1.5, 5.1, 1.0), MASK, low=0.5, high=5.0)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 1.5, 0.0, 0.0]]))
    torch.testing.assert_close(icepop(log_of(0.5, 5.0, 1.0, 1.0), MASK, low=0.5, high=5.0)[0, :2], torch.tensor([0.5, 5.0]))


def test_sequence_mask_keeps_the_product_inside_the_band_and_drops_it_outside():
    # 0.5 * 1.5 * 2 = 1.5; 0.5 * 2 * 4 = 4; 0.5 * 0.5 * 1 = 0.25.
    log_rho = torch.cat([log_of(0.5, 1.5, 2.0, 9.0), log_of(0.5, 2.0, 4.0, 0.1), log_of(0.5, 0.5, 1.0, 9.0)])
    mask = MASK.expand(3, 4)
    expected = torch.tensor([[1.5, 1.5, 1.5, 0.0], [0.0] * 4, [0.25, 0.25, 0.25, 0.0]])
    torch.testing.assert_close(sequence_mask(log_rho, mask, low=0.0, high=3.0), expected)
    expected[2] = 0.0
    torch.testing.assert_close(sequence_mask(log_rho, mask, low=0.5, high=3.0), expected)


def test_geometric_mask_looks_at_the_mean_log_ratio_and_weighs_one():
    # Cube roots of 0.5 * 2 * 1.1, of 1.2 and of 0.8: 1.032, 1.063, 0.928.
    log_rho = torch.cat([log_of(0.5, 2.0, 1.1, 9.0), log_of(1.0, 1.2, 1.0, 0.1), log_of(1.0, 1.0, 0.8, 9.0)])
    weights = geometric_mask(log_rho, MASK.expand(3, 4), low=0.95, high=1.05)
    assert weights.tolist() == [[1.0, 1.0, 1.0, 0.0], [0.0] * 4, [0.0] * 4]


def test_opsm_drops_rows_of_negative_advantage_that_the_policy_moved_away_from():
    # Means of -log rho: 0.2, 0.2, 0.05, -0.2; the masked token is far off.
    log_rho = torch.tensor([[-0.4, 0.0, -0.2, 7.0], [-0.4, 0.0, -0.2, 7.0], [-0.05, -0.1, 0.0, -7.0], [0.2, 0.2, 0.2, -7.0]])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])[:, None].expand(4, 4)
    weights = opsm(log_rho, MASK.expand(4, 4), advantages, threshold=0.1)
    assert weights[:, :3].tolist() == [[0.0] * 3, [1.0] * 3, [1.0] * 3, [1.0] * 3]
    assert not weights[:, 3].any()


def test_weights_are_detached_and_finite_and_zero_outside_the_mask():
    log_rho = torch.tensor(
        [[1000.0, 1000.0, math.nan], [-1000.0, -1000.0, -math.inf], [math.nan, math.inf, -math.inf], [0.0, math.nan, math.nan]],
        requires_grad=True,
    )
    mask = torch.tensor([[True, True, False], [True, True, False], [False, False, False], [True, False, False]])
    advantages = torch.tensor([[1.0, 1.0, math.nan], [-1.0, -1.0, math.nan], [math.nan] * 3, [-1.0, math.nan, math.nan]])
    turns = torch.zeros_like(mask, dtype=torch.int64)
    for name, weights in every_correction(log_rho, mask, advantages, turns).items():
        assert not weights.requires_grad, name
        assert weights.dtype == torch.float32, name
        assert weights.shape == mask.shape, name
        assert torch.isfinite(weights).all(), name
        assert torch.all(weights[~mask] == 0), name
        assert weights[3, 0] == 1, name


def test_equal_policies_weigh_one_everywhere():
    mask = torch.tensor([[True, False, True], [True, True, True]])
    advantages = torch.tensor([[-1.0] * 3, [1.0] * 3])
    turns = torch.zeros_like(mask, dtype=torch.int64)
    for name, weights in every_correction(torch.zeros(2, 3), mask, advantages, turns).items():
        assert torch.equal(weights, mask.float()), name


def test_a_weight_has_a_bound_where_its_setting_has_none():
    log_rho = torch.full((1, 4), 1000.0)
    for weights in (
        token_tis(log_rho, MASK, low=0.0, high=math.inf),
        sequence_tis(log_rho, MASK, low=0.0, high=math.inf),
        geometric_tis(log_rho, MASK, low=0.0, high=math.inf),
        icepop(log_rho, MASK, low=0.0, high=math.inf),
        sequence_mask(log_rho, MASK, low=0.0, high=math.inf),
    ):
        torch.testing.assert_close(weights[0, :3], torch.full((3,), math.exp(LOG_RATIO_BOUND)))


def segments_within(log_rho, mask, turns):
    """Return for each loss token whether the mean of its turn's loss tokens is within the bounds of `every_correction`."""
    kept = []
    for _, turn in itertools.groupby(
        zip(log_rho[mask].tolist(), turns[mask].tolist(), strict=True), key=lambda token: token[1]
    ):
        values = [value for value, _ in turn]
        kept += [float(0.9 <= math.exp(sum(values) / len(values)) <= 1.1)] * len(values)
    return kept


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_weights_equal_the_formulas_evaluated_row_by_row_in_float64(seed):
    generator = torch.Generator().manual_seed(seed)
    log_rho = 0.5 * torch.randn(12, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(12, 5, generator=generator) < 0.7
    advantages = torch.randn(12, 1, generator=generator).expand(12, 5)
    turns = (torch.rand(12, 5, generator=generator) < 0.4).cumsum(dim=-1).clamp(max=4)
    actual = every_correction(torch.where(mask, log_rho, math.nan), mask, advantages, turns)
    for row in range(12):
        ratios = log_rho[row, mask[row]].exp()
        if not len(ratios):
            continue
        product, root = ratios.prod(), ratios.prod() ** (1 / len(ratios))
        k2, k3 = ratios.log().square().mean() / 2, (ratios - 1 - ratios.log()).mean()
        moved_away = bool(-ratios.log().mean() > 0.1) and advantages[row, 0] < 0
        expected = {
            "token_tis": torch.tensor([min(max(float(ratio), 0.5), 2.0) for ratio in ratios]),
            "sequence_tis": torch.full((len(ratios),), min(max(float(product), 0.3), 2.0)),
            "geometric_tis": torch.full((len(ratios),), min(max(float(root), 0.9), 1.1)),
            "k2_mask": torch.full((len(ratios),), float(k2 <= 0.1)),
            "k3_mask": torch.full((len(ratios),), float(k3 <= 0.1)),
            "segment_mask": torch.tensor(segments_within(log_rho[row], mask[row], turns[row])),
            "icepop": torch.tensor([float(ratio) if 0.5 <= ratio <= 5.0 else 0.0 for ratio in ratios]),
            "sequence_mask": torch.full((len(ratios),), float(product) if product <= 3.0 else 0.0),
            "geometric_mask": torch.full((len(ratios),), float(0.9 <= root <= 1.1)),
            "opsm": torch.full((len(ratios),), 0.0 if moved_away else 1.0),
        }
        for name, weights in expected.items():
            torch.testing.assert_close(actual[name][row, mask[row]].float(), weights, msg=name)
