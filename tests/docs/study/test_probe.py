"""Claims about `docs.study.probe`, by hand-computed numbers."""

import numpy as np
import pytest
import torch

from docs.study.probe import compare_gradients, distances


def test_distances_are_those_of_two_distributions() -> None:
    """For pi = (0.8, 0.2) and mu = (0.5, 0.5): TV = 0.3, chi-squared = 0.64 / 0.5 + 0.04 / 0.5 - 1 = 0.36."""
    assert distances(np.array([1.6, 0.4])) == (pytest.approx(0.3), pytest.approx(0.36))
    assert distances(np.ones(3)) == (0.0, 0.0)


def test_cosine_and_variance_are_freed_from_the_noise_of_the_means() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.zeros(400)
    expected[0] = 1.0
    turned = torch.zeros(400)
    turned[:2] = torch.tensor([0.6, 0.8])

    def batches(mean: torch.Tensor) -> torch.Tensor:
        # A variance of 400 * 0.01 = 4 beside a squared norm of 1.
        return mean + 0.1 * torch.randn(200, 400, generator=generator)

    cosine, variance = compare_gradients(batches(expected), batches(turned))
    assert cosine == pytest.approx(0.6, abs=0.03)
    assert variance == pytest.approx(4.0, rel=0.05)


def test_a_mean_that_is_not_told_from_0_has_no_direction() -> None:
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    known = torch.tensor([[1.0, 0.0], [1.0, 0.1]])
    assert compare_gradients(opposite, known) == (None, None)
    cosine, variance = compare_gradients(known, opposite)
    assert cosine is None
    assert variance == pytest.approx(0.005, rel=0.01)


def test_a_mean_whose_noise_is_larger_than_itself_has_no_direction() -> None:
    """Two values 1 + a and 1 - a: the mean's noise is a^2, and 1 - a^2 is left of its squared norm."""
    known = torch.tensor([[1.0, 0.0], [1.0, 0.1]])
    assert compare_gradients(torch.tensor([[1.8, 0.0], [0.2, 0.0]]), known) == (None, pytest.approx(1.28 / 0.36))
    cosine, variance = compare_gradients(torch.tensor([[1.6, 0.0], [0.4, 0.0]]), known)
    assert variance == pytest.approx(0.72 / 0.64)
    # (1, 0) . (1, 0.05) over the root of 0.64 times 1.
    assert cosine == pytest.approx(1 / 0.8, rel=0.01)
