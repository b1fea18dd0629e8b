"""The report draws the user's own numbers about evaluations."""

from offbeat.common.pages.figures import Plot
from offbeat.common.pages.page import Grid
from offbeat.common.records.rows import EvalRow
from offbeat.lab.history import RunHistory
from offbeat.lab.report.sections import evaluation_sections


def row(policy_version: int, numbers: dict[str, float]) -> EvalRow:
    return EvalRow(policy_version=policy_version, reward=0.5, length=1.0, num_completions=1, num_failed=0, numbers=numbers)


def test_own_numbers_are_lines_over_policy_versions_and_absent_where_there_are_none() -> None:
    rows = [row(10, {"<b>cut": 0.5}), row(20, {}), row(30, {"<b>cut": 0.25})]
    lines = [("<b>cut", [10, 30], [0.5, 0.25])]
    for evaluations, drawn in ((rows, [lines]), ([row(10, {})], [])):
        history = RunHistory(evaluations={one.policy_version: one for one in evaluations})
        (section,) = evaluation_sections(history)
        (grid,) = section.blocks
        assert isinstance(grid, Grid)
        plots = [plot for plot in grid.cards if isinstance(plot, Plot) and plot.title == "Own numbers"]
        assert [[(line["name"], line["x"], line["y"]) for line in plot.traces] for plot in plots] == drawn
