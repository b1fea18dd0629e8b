"""The report's evaluations: pass@k and the reward of each named set, measured on the held-out prompts."""

import html
from collections.abc import Callable, Mapping, Sequence

from offbeat.common.records.rows import EvalRow
from offbeat.lab.history import RunHistory
from offbeat.lab.report.figures import ACTOR_COLORS, Plot, Trace, line_trace, step_layout
from offbeat.lab.report.page import Figures, section


def evaluation_section(figures: Figures, history: RunHistory) -> str:
    """Return the part of the page about evaluations; empty for a run without one."""
    rows = [row for _, row in sorted(history.evaluations.items())]
    if not rows:
        return ""
    plots = [pass_at_k(rows)]
    if any(row.sets for row in rows):
        plots.append(reward_by_set(rows))
    if any(row.numbers for row in rows):
        plots.append(own_numbers(rows))
    return section("Evaluation", "How well does the policy solve prompts that it is not trained on?", figures.cards(plots))


def pass_at_k(rows: Sequence[EvalRow]) -> Plot:
    """Return pass@k over policy versions, a line for each k; `rows` are ordered by version."""
    ks = sorted({k for row in rows for k in row.pass_at if k.isdecimal()}, key=int)
    return Plot(
        "Held-out pass@k",
        "Share of the held-out prompts that at least one of k completions solves: a reward of evaluation.pass_reward or more.",
        [_line(rows, lambda row: row.pass_at, k, f"pass@{k}", index) for index, k in enumerate(ks)],
        step_layout("policy version", [row.policy_version for row in rows], "share of prompts", y={"rangemode": "tozero"}),
        missing="No evaluation has measured pass@k.",
    )


def reward_by_set(rows: Sequence[EvalRow]) -> Plot:
    """Return the mean reward of each named set over policy versions; `rows` are ordered by version."""
    return _named_lines(
        rows,
        lambda row: row.sets,
        "Held-out reward by set",
        "Mean reward of the completions of each named set of task.eval_data.",
        "reward",
        "No evaluation has measured a named set.",
    )


def own_numbers(rows: Sequence[EvalRow]) -> Plot:
    """Return the numbers of `evaluation.function` over policy versions; `rows` are ordered by version."""
    return _named_lines(
        rows,
        lambda row: row.numbers,
        "Own numbers",
        "The numbers that evaluation.function returned.",
        "number",
        "evaluation.function has returned no number.",
    )


def _named_lines(
    rows: Sequence[EvalRow],
    numbers: Callable[[EvalRow], Mapping[str, float]],
    title: str,
    question: str,
    axis: str,
    missing: str,
) -> Plot:
    """Return a plot with a line for each name among the numbers, which is the user's text."""
    names = sorted({name for row in rows for name in numbers(row)})
    lines = [_line(rows, numbers, name, html.escape(name), index) for index, name in enumerate(names)]
    layout = step_layout("policy version", [row.policy_version for row in rows], axis)
    return Plot(title, question, lines, layout, missing=missing)


def _line(
    rows: Sequence[EvalRow], numbers: Callable[[EvalRow], Mapping[str, float]], key: str, label: str, index: int
) -> Trace:
    pairs = [(row.policy_version, numbers(row)[key]) for row in rows if key in numbers(row)]
    color = ACTOR_COLORS[index % len(ACTOR_COLORS)]
    return line_trace([version for version, _ in pairs], [number for _, number in pairs], label, color)
