import math

import pytest
import torch

from offbeat.learner.diagnostics.step_metrics import GradientDirection


def test_cosine_is_with_the_call_before_and_absent_in_the_first():
    direction = GradientDirection()
    # (3, 4, 0), (4, 3, 0): 24 / 25. Then (0, 0, 2): 0, and the opposite: -1.
    assert direction.compare([("a", torch.tensor([3.0, 4.0])), ("b", torch.tensor([[0.0]]))]) is None
    assert direction.compare([("a", torch.tensor([4.0, 3.0])), ("b", torch.tensor([[0.0]]))]) == pytest.approx(0.96)
    assert direction.compare([("a", torch.tensor([0.0, 0.0])), ("b", torch.tensor([[2.0]]))]) == 0.0
    assert direction.compare([("a", torch.tensor([0.0, 0.0])), ("b", torch.tensor([[-1.0]]))]) == pytest.approx(-1.0)


def test_a_gradient_that_is_missing_is_zero():
    direction = GradientDirection()
    assert direction.compare([("a", torch.tensor([3.0])), ("b", None)]) is None
    # (3, 0) and (3, 4): 9 / 15; then (0, 4) with (3, 4): 16 / 20.
    assert direction.compare([("a", torch.tensor([3.0])), ("b", torch.tensor([4.0]))]) == pytest.approx(0.6)
    assert direction.compare([("b", torch.tensor([4.0]))]) == pytest.approx(0.8)


def test_there_is_no_cosine_with_a_gradient_of_zero_or_none_at_all():
    direction = GradientDirection()
    assert direction.compare([]) is None
    assert direction.compare([("a", torch.zeros(2))]) is None
    assert direction.compare([("a", torch.ones(2))]) is None
    assert direction.compare([("a", torch.zeros(2))]) is None


def test_the_scale_of_a_gradient_does_not_matter_even_where_its_square_overflows_float32():
    direction = GradientDirection()
    direction.compare([("a", torch.tensor([3e30, 4e30]))])
    assert direction.compare([("a", torch.tensor([4e-30, 3e-30]))]) == pytest.approx(0.96)


def test_a_gradient_that_is_not_finite_gives_nan():
    direction = GradientDirection()
    direction.compare([("a", torch.ones(2))])
    assert math.isnan(direction.compare([("a", torch.tensor([math.nan, 1.0]))]) or 0.0)


def pair_of_gradients(cosine: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return two gradients of 35,000 coordinates in tensors of several sizes, of one magnitude, in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    first = {f"{size}": torch.randn(size, 100, generator=generator) for size in (40, 200, 10, 100)}
    second = {
        name: cosine * values + math.sqrt(1 - cosine**2) * torch.randn(values.shape, generator=generator)
        for name, values in first.items()
    }
    return ({name: x.bfloat16() for name, x in first.items()}, {name: x.bfloat16() for name, x in second.items()})


@pytest.mark.parametrize("cosine", [-0.6, 0.0, 0.9])
def test_a_sample_of_the_coordinates_is_about_as_good(cosine):
    first, second = pair_of_gradients(cosine)
    sampled = GradientDirection(max_coordinates=5000)
    sampled.compare(first.items())
    # Five standard errors of 2,500 coordinates, to which halving may have come.
    assert sampled.compare(second.items()) == pytest.approx(cosine, abs=0.1)


def test_no_more_coordinates_are_kept_than_allowed_and_every_tensor_has_its_share():
    first, second = pair_of_gradients(0.5)
    direction = GradientDirection(max_coordinates=1000)
    direction.compare(first.items())
    direction.compare(second.items())
    kept = {name: len(indices) for name, indices in direction._indices.items()}
    assert 500 < sum(kept.values()) <= 1000
    shares = [count / first[name].numel() for name, count in kept.items()]
    assert max(shares) < 1.1 * min(shares)


def test_a_tensor_that_comes_late_takes_room_from_the_others():
    """A new expert gets coordinates, and the samples of the other tensors shrink."""
    first, second = pair_of_gradients(0.9)
    direction = GradientDirection(max_coordinates=5000)
    direction.compare([("200", first["200"])])
    expected = 0.9 * math.sqrt(20_000 / 35_000)
    assert direction.compare(second.items()) == pytest.approx(expected, abs=0.1)
    assert sum(map(len, direction._indices.values())) <= 5000


def test_the_sample_is_the_same_in_every_process_and_leaves_the_random_state_alone():
    first, second = pair_of_gradients(0.5)
    state = torch.get_rng_state()
    cosines = []
    for _ in range(2):
        direction = GradientDirection(max_coordinates=100)
        direction.compare(first.items())
        cosines.append(direction.compare(second.items()))
    assert cosines[0] == cosines[1]
    assert torch.equal(torch.get_rng_state(), state)
