"""Claims about `common.formats`: what people read is short and has its unit."""

import numpy as np
import pytest

from offbeat.common.formats import duration, listed, number, to_toml


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0.0 s"),
        (9.54, "9.5 s"),
        (59.94, "59.9 s"),
        (60.0, "1 min 00 s"),
        (185.4, "3 min 05 s"),
        (7800.0, "2 h 10 min"),
        (360_000.0, "100 h 00 min"),
    ],
)
def test_duration_is_said_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_number_that_is_not_known_is_a_dash() -> None:
    assert [number(0.5), number(0.5, ".1%"), number(None, ".1%")] == ["0.500", "50.0%", "–"]


def test_parts_are_listed_with_a_word_before_the_last() -> None:
    assert [listed(parts) for parts in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float64(1e-4), "0.0001"),
        (np.float32(0.7), "0.7"),
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        ([np.float64("inf"), np.bool_(False)], "[inf, false]"),
    ],
)
def test_numbers_of_numpy_are_written_as_numbers(value: object, text: str) -> None:
    assert to_toml(value) == text
