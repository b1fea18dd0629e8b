"""Draws the held-out reward of runs over their optimizer steps, as an SVG for a page.

    python -m docs.generate.curve docs/images/smollm2.svg --title TITLE "all weights=RUN" "all weights=RUN" "adapter=RUN"

Runs of the same label are seeds of one experiment and have one color.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment

from offbeat.common.records.rows import EvalRow
from offbeat.common.records.writer import ROWS_FILE, read_rows

WIDTH, HEIGHT = 820, 300
LEFT, RIGHT, TOP, BOTTOM = 48, 172, 44, 40
COLORS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df")

TEMPLATE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" role="img" aria-labelledby="title">
<title id="title">{{ title }}</title>
<style>
  text { font: 12.5px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #24292f; }
  .head { font-weight: 600; } .mid { text-anchor: middle; } .end { text-anchor: end; } .dim { fill: #6e7781; }
  .page { fill: #fff; stroke: #d0d7de; } .grid { stroke: #d8dee4; } polyline { fill: none; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .dim { fill: #9198a1; } .page { fill: #0d1117; stroke: #3d444d; } .grid { stroke: #2a313c; }
  }
</style>
<rect class="page" x=".5" y=".5" width="{{ width - 1 }}" height="{{ height - 1 }}" rx="6"/>
<text class="head" x="16" y="25">{{ title }}</text>
{% for tick in y_ticks %}
<line class="grid" x1="{{ x(0) }}" x2="{{ x(last_step) }}" y1="{{ y(tick) }}" y2="{{ y(tick) }}"/>
<text class="end dim" x="{{ x(0) - 8 }}" y="{{ y(tick) + 4 }}">{{ "%.1f" | format(tick) }}</text>
{% endfor %}
{% for step in x_ticks %}
<text class="mid dim" x="{{ x(step) }}" y="{{ y(0) + 20 }}">{{ "step " if loop.first }}{{ step }}</text>
{% endfor %}
{% for label, color, curves in experiments %}
{% for curve in curves %}
<polyline stroke="{{ color }}" points="{% for step, reward in curve %}{{ x(step) }},{{ y(reward) }} {% endfor %}"/>
{% for step, reward in curve %}<circle cx="{{ x(step) }}" cy="{{ y(reward) }}" r="3" fill="{{ color }}"/>{% endfor %}
{% endfor %}
<rect x="{{ x(last_step) + 18 }}" y="{{ 52 + 24 * loop.index0 }}" width="14" height="4" fill="{{ color }}"/>
<text x="{{ x(last_step) + 40 }}" y="{{ 58 + 24 * loop.index0 }}">{{ label }}</text>
{% endfor %}
</svg>
"""


class Experiment(NamedTuple):
    """The seeds of one experiment."""

    label: str
    color: str
    curves: list[list[tuple[int, float]]]
    """Step and held-out reward of each evaluation, by seed."""


def read_curve(run: Path) -> list[tuple[int, float]]:
    """Return step and held-out reward of each evaluation of a run; one repeated after a restart counts once."""
    rows = (row for row in read_rows(run / ROWS_FILE) if isinstance(row, EvalRow))
    return sorted({row.policy_version: row.reward or 0.0 for row in rows}.items())


def draw(title: str, experiments: list[Experiment]) -> str:
    """Return the SVG; rewards are between 0 and 1."""
    last_step = max(curve[-1][0] for experiment in experiments for curve in experiment.curves)

    def x(step: float) -> float:
        return round(LEFT + step / last_step * (WIDTH - LEFT - RIGHT), 1)

    def y(reward: float) -> float:
        return round(HEIGHT - BOTTOM - reward * (HEIGHT - TOP - BOTTOM), 1)

    ticks = {"x_ticks": range(0, last_step + 1, 10), "y_ticks": [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]}
    template = Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE)
    sizes = {"width": WIDTH, "height": HEIGHT, "last_step": last_step, "x": x, "y": y}
    return template.render(title=title, experiments=experiments, **ticks, **sizes)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--title", required=True)
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN")
    arguments = parser.parse_args()
    curves: dict[str, list[list[tuple[int, float]]]] = {}
    for text in arguments.runs:
        label, _, run = text.partition("=")
        curves.setdefault(label, []).append(read_curve(Path(run)))
    experiments = [Experiment(label, COLORS[index], of_label) for index, (label, of_label) in enumerate(curves.items())]
    arguments.out.write_text(draw(arguments.title, experiments), encoding="utf-8")


if __name__ == "__main__":
    main()
