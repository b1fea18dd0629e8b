"""Curves of a run that grow with it in bounded memory: old points are merged in pairs when there are too many."""

from typing import NamedTuple

MOST_POINTS = 600
"""Most points of a curve: more than a plot has pixels for."""


class Points(NamedTuple):
    """A curve, by rising x."""

    xs: list[float]
    ys: list[float]


class Curve:
    """The means of consecutive values, each over equally many of them but for the last."""

    def __init__(self) -> None:
        self._xs: list[float] = []
        self._ys: list[float] = []
        self._stride = 1
        """Values that each point but the last is a mean of."""
        self._num_in_last = 0

    def add(self, x: float, y: float) -> None:
        """Append a value, merging points in pairs where there would be more than `MOST_POINTS`.

        The points from `x` on are replaced: a resumed run makes their steps again.
        """
        while self._xs and self._xs[-1] >= x:
            self._xs.pop()
            self._ys.pop()
            self._num_in_last = self._stride
        if self._num_in_last and self._num_in_last < self._stride:
            weight = 1 / (self._num_in_last + 1)
            self._xs[-1] += (x - self._xs[-1]) * weight
            self._ys[-1] += (y - self._ys[-1]) * weight
            self._num_in_last += 1
            return
        if len(self._xs) == MOST_POINTS:
            self._xs, self._ys = _halved(self._xs), _halved(self._ys)
            self._stride *= 2
        self._xs.append(x)
        self._ys.append(y)
        self._num_in_last = 1

    def points(self) -> Points:
        """Return the curve so far."""
        return Points(list(self._xs), list(self._ys))


def _halved(values: list[float]) -> list[float]:
    return [(first + second) / 2 for first, second in zip(values[::2], values[1::2], strict=True)]
