"""The study's pictures: the final reward of every method at every lag, one SVG for each task and noise."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_CELL_WIDTH, _CELL_HEIGHT, _LEFT, _TOP = 72, 24, 190, 52
_LOW, _MIDDLE, _HIGH = (178, 24, 43), (247, 247, 247), (33, 102, 172)
"""Red, nearly white and blue: told apart by readers who are color-blind, too."""


def heat_map(title: str, methods: Sequence[str], lags: Sequence[int], rewards: Mapping[tuple[str, int], float]) -> str:
    """Return an SVG with a row for each method and a column for each lag; a missing run is blank.

    Rewards are between 0 and 1.
    """
    width, height = _LEFT + _CELL_WIDTH * len(lags) + 10, _TOP + _CELL_HEIGHT * len(methods) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="18" font-weight="bold">{escape(title)}</text>',
        f'<text x="{_LEFT - 8}" y="{_TOP - 8}" text-anchor="end" fill="#555">lag</text>',
    ]
    for column, lag in enumerate(lags):
        center = _LEFT + _CELL_WIDTH * (column + 0.5)
        parts.append(f'<text x="{center:g}" y="{_TOP - 8}" text-anchor="middle">{lag}</text>')
    for line, method in enumerate(methods):
        top = _TOP + _CELL_HEIGHT * line
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{escape(method)}</text>')
        for column, lag in enumerate(lags):
            reward = rewards.get((method, lag))
            if reward is None:
                continue
            left, shade = _LEFT + _CELL_WIDTH * column, _color(reward)
            ink = "white" if abs(reward - 0.5) > 0.35 else "black"
            parts.append(
                f'<rect x="{left}" y="{top}" width="{_CELL_WIDTH - 2}" height="{_CELL_HEIGHT - 2}" fill="{shade}"/>'
                f'<text x="{left + _CELL_WIDTH / 2 - 1:g}" y="{top + 16}" text-anchor="middle" fill="{ink}">{reward:.2f}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _color(reward: float) -> str:
    share = min(1.0, max(0.0, reward))
    start, end, place = (_LOW, _MIDDLE, 2 * share) if share < 0.5 else (_MIDDLE, _HIGH, 2 * share - 1)
    return "#" + "".join(f"{round(first + place * (second - first)):02x}" for first, second in zip(start, end, strict=True))
