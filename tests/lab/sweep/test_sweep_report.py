"""Claims about `lab.sweep.sweep_report`: the numbers of page and JSON are the finished runs', and every sweep gets both."""

import html.parser
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.deploy.experiments.trials import make_trials, prepare
from offbeat.lab.history import RunHistory, fold_rows
from offbeat.lab.sweep.measures import measure, reward_curves
from offbeat.lab.sweep.plan import Hopeless, Plan, make_plan, mark_hopeless
from offbeat.lab.sweep.sweep_report import write_sweep_report
from tests.common.records.row_lines import rows_from
from tests.lab.report.test_report import figure_titled, figures_in, text_of
from tests.lab.sweep.sweep_runs import START, rows_of_run, write_rows

pytestmark = pytest.mark.slow

CONFIG = """
[model]
path = "models/tiny"
[data]
train_data = "copy.jsonl"
[train]
num_steps = 12
groups_per_step = 2
"""

LEARNED = [0.0, 0.5, *([0.9] * 10)]
"""Rewards of a run whose final reward is 0.9, reached at the twelfth step."""


def sweep_in(folder: Path, *varied: str, seeds: int) -> Plan:
    """Plan a sweep in `folder`, without any rows."""
    (folder / "run.toml").write_text(CONFIG)
    plan = make_plan(varied, num_seeds=seeds, first_seed=0)
    prepare(plan, make_trials(plan, folder / "run.toml", [], folder), folder)
    return plan


def whole_sweep(folder: Path) -> None:
    """Write a sweep of bounds 0, 4 and 8 with three seeds: 4 is as good in half the time, 8 is worse."""
    sweep_in(folder, "max_staleness=0,4,8", seeds=3)
    for seed in range(3):
        for bound, step_s, loss in ((0, 2.0, 0.0), (4, 1.0, 0.0), (8, 1.0, 0.3)):
            rewards = [reward - loss + 0.001 * seed for reward in LEARNED]
            rows = rows_of_run(rewards, lag=bound, step_s=step_s + 0.01 * seed)
            write_rows(folder / f"max_staleness={bound}" / f"seed={seed}", rows)


def report_of(folder: Path, margin: float = 0.02, baseline: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Write the report; return the page and the JSON."""
    page = write_sweep_report(folder, margin, baseline).read_text()
    return page, json.loads((folder / "sweep.json").read_text())


def cells_of(page: str, title: str) -> list[list[str]]:
    """Return the lines of the first table after a heading, beginning with its head."""
    section = page[page.index(f"<h2>{title}</h2>") :]
    table = section[section.index("<table>") : section.index("</table>")]
    lines = re.findall(r"<tr>(.*?)</tr>", table)
    return [[text_of(cell).strip() for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", line)] for line in lines]


# One run


def history_of(rows: list[dict[str, Any]]) -> RunHistory:
    return fold_rows(rows_from(rows))


def test_clock_of_a_run_starts_with_its_first_batch() -> None:
    history = history_of(rows_of_run([0.0, 0.5, 1.0], step_s=2.0, first_wait_s=30.0))
    measures, curves = measure(history, TrainSection()), reward_curves(history, TrainSection())
    assert measures.train_s == pytest.approx(6.0)
    assert curves.by_seconds.xs == pytest.approx([2.0, 4.0, 6.0])
    assert (curves.by_groups.xs, curves.by_groups.ys) == ([2, 4, 6], [0.0, 0.5, 1.0])
    # Two steps of half a second each; the first one's wait is for actors to start.
    assert measures.learner_idle_share == pytest.approx(1.0 / 6.0)
    assert (measures.tokens_per_s, measures.groups_per_s) == (pytest.approx(50.0), pytest.approx(1.0))


def test_clock_stands_still_while_a_run_is_restarted() -> None:
    rows = rows_of_run([0.0, 0.5], step_s=2.0, first_wait_s=30.0)[:-1]
    again = START + 1000
    rows.append({"kind": "event", "time": again, "event": "run_started", "detail": "offbeat 9.9"})
    for version, step_s, waited_s in ((2, 22.0, 20.0), (3, 3.0, 1.0)):
        again += step_s
        row = {"kind": "step", "time": again, "policy_version": version, "reward/mean": 0.5, "lag/counts": {"1": 2}}
        rows.append(row | {"time/step_s": step_s, "time/wait_rollouts_s": waited_s})
    curves = reward_curves(history_of(rows), TrainSection())
    assert curves.by_seconds.xs == pytest.approx([2.0, 4.0, 7.0]), "the step that is done again counts once"


def test_all_steps_of_the_first_batch_leave_its_wait_out() -> None:
    history = history_of(rows_of_run([0.0, 0.0, 0.0, 0.0], step_s=2.0, waited_s=0.5))
    whole = measure(history, TrainSection()).train_s
    assert measure(history, TrainSection(steps_per_batch=2)).train_s == pytest.approx(whole - 0.5)


def test_group_that_is_passed_over_twice_counts_once() -> None:
    history = history_of(rows_of_run([0.0, 0.0, 0.0, 0.0]))
    assert reward_curves(history, TrainSection(epochs_per_batch=2)).by_groups.xs == [1, 2, 3, 4]
    assert measure(history, TrainSection(epochs_per_batch=2)).num_groups == 4


def test_numbers_of_a_run_are_its_rows() -> None:
    measures = measure(history_of(rows_of_run(LEARNED, lag=3)), TrainSection())
    assert measures.final_reward == pytest.approx(0.9)
    assert measures.held_out_reward == 0.75
    assert (measures.num_steps, measures.num_groups, measures.lag_mean, measures.lag_max) == (12, 24, 3.0, 3)
    assert measures.actor_shares == {"generate": 0.75, "wait_leases": 0.25}
    assert (measures.clip_fraction, measures.log_ratio_std) == (pytest.approx(0.25), pytest.approx(0.01))
    assert measures.kl_behavior_policy == pytest.approx(1e-3)
    assert (measures.generated_length, measures.trained_length, measures.dropped_share) == (15.0, 15.0, 0.0)


def test_dropped_groups_are_counted_by_reason() -> None:
    rows = rows_of_run(LEARNED)
    dropped = next(row for row in rows if row["kind"] == "group") | {"lease_id": 999, "outcome": "dropped", "reason": "stale"}
    measures = measure(history_of([*rows, dropped | {"lengths": [100, 120]}]), TrainSection())
    assert (measures.dropped_share, measures.dropped) == (pytest.approx(1 / 25), {"stale": 1})
    assert measures.generated_length == pytest.approx((24 * 15 + 110) / 25)
    assert measures.trained_length == 15.0


def test_run_without_rows_has_no_numbers() -> None:
    measures = measure(history_of([]), TrainSection())
    assert (measures.final_reward, measures.tokens_per_s, measures.lag_mean, measures.dropped_share) == (None,) * 4
    assert (measures.num_steps, measures.train_s, measures.lag_max) == (0, 0, None)


# The page


def test_values_are_means_over_seeds_with_their_spread(tmp_path: Path) -> None:
    whole_sweep(tmp_path)
    page, told = report_of(tmp_path)
    rewards = [value["estimates"]["final_reward"] for value in told["values"]]
    assert [reward["mean"] for reward in rewards] == pytest.approx([0.901, 0.901, 0.601])
    assert [reward["std"] for reward in rewards] == pytest.approx([0.001] * 3)
    head, *lines = cells_of(page, "Learning")
    assert head[:4] == ["staleness.max_staleness", "Runs", "Final reward", "Held-out reward"]
    assert [line[:4] for line in lines] == [
        ["0 (reference)", "3 of 3", "0.901 ± 0.001", "0.750 ± 0.000"],
        ["4 (recommended)", "3 of 3", "0.901 ± 0.001", "0.750 ± 0.000"],
        ["8", "3 of 3", "0.601 ± 0.001", "0.750 ± 0.000"],
    ]
    assert cells_of(page, "Runs")[0][:3] == ["Run", "State", "Steps"]


def test_time_to_the_references_reward_is_a_ratio(tmp_path: Path) -> None:
    whole_sweep(tmp_path)
    _, told = report_of(tmp_path)
    assert told["reference_reward"] == pytest.approx(0.901)
    # Ten steps are first at 0.9 - 0.02 with the twelfth: the mean of steps 2 to 11 is 0.86.
    synchronous, four, eight = told["values"]
    assert synchronous["seconds_to_margin"]["mean"] == pytest.approx(12 * 2.01)
    assert four["seconds_to_margin"]["mean"] == pytest.approx(12 * 1.01)
    assert four["groups_to_margin"]["mean"] == 24
    assert four["time_ratio"]["difference"] == pytest.approx(0.5, abs=0.01)
    assert (eight["num_to_margin"], eight["seconds_to_margin"], eight["time_ratio"]) == (0, None, None)
    # Seeds 1 and 2 end at 0.901 and 0.902: only these are as high as the mean.
    assert synchronous["num_to_reference"] == 2


def test_recommendation_stands_on_the_page_with_its_rule(tmp_path: Path) -> None:
    whole_sweep(tmp_path)
    page, told = report_of(tmp_path)
    assert told["recommendation"]["label"] == "4"
    text = text_of(page)
    assert "4: it comes soonest within 0.02 of the final reward of 0, in 0.50 of its time" in text
    assert "8 ends lower than 0: by 0.300" in text
    assert "0 and 4 cannot be distinguished with 3 seeds" in text
    assert "Of the values whose final reward is not shown to be below the reference's" in text


def test_every_value_is_compared_with_the_reference_in_pairs_of_one_seed(tmp_path: Path) -> None:
    whole_sweep(tmp_path)
    page, told = report_of(tmp_path)
    assert [(one["label"], one["baseline"]) for one in told["differences"]] == [("4", "0"), ("8", "0")]
    # Seeds differ by 0.001 in the same way under every value, so the differences hardly spread: 0 and -0.3 in every pair.
    assert [line[:4] for line in cells_of(page, "Comparisons")[1:]] == [
        ["4", "0", "not distinguishable", "+0.000 (+0.000 to +0.000)"],
        ["8", "0", "lower", "-0.300 (-0.300 to -0.300)"],
    ]


def matrix_sweep(folder: Path) -> None:
    """Write a sweep of two objectives and two bounds with three seeds; `grpo` is worse at the larger bound."""
    sweep_in(folder, "objective=gspo,grpo", "max_staleness=0,4", seeds=3)
    final = {
        ("gspo", 0): (0.9, 0.8, 0.7),
        ("gspo", 4): (0.8, 0.8, 0.6),
        ("grpo", 0): (0.9, 0.8, 0.8),
        ("grpo", 4): (0.4, 0.4, 0.1),
    }
    for (objective, bound), rewards in final.items():
        for seed, reward in enumerate(rewards):
            write_rows(
                folder / f"objective={objective}" / f"max_staleness={bound}" / f"seed={seed}", rows_of_run([reward] * 12)
            )


def test_a_baseline_is_chosen_for_each_of_the_other_settings(tmp_path: Path) -> None:
    matrix_sweep(tmp_path)
    page, told = report_of(tmp_path, baseline=["objective=gspo"])
    assert [(one["label"], one["baseline"]) for one in told["differences"]] == [
        ("objective=grpo, max_staleness=0", "objective=gspo, max_staleness=0"),
        ("objective=grpo, max_staleness=4", "objective=gspo, max_staleness=4"),
    ]
    same, worse = (one["final_reward"] for one in told["differences"])
    # -0.4, -0.4, -0.5: mean -0.4333, standard error 0.0333, t(2) = 13, p = 0.005865: the only test of its baseline.
    assert worse["compared"]["difference"] == pytest.approx(-0.43333, abs=1e-5)
    assert worse["adjusted_p"] == pytest.approx(0.005865, abs=1e-6)
    assert same["adjusted_p"] == pytest.approx(0.42265, abs=1e-5)
    assert [line[2] for line in cells_of(page, "Comparisons")[1:]] == ["not distinguishable", "lower"]
    # Against the reference alone there are three tests.
    _, told = report_of(tmp_path)
    assert {one["baseline"] for one in told["differences"]} == {"objective=gspo, max_staleness=0"}
    assert len(told["differences"]) == 3


def test_hopeless_run_counts_with_the_reward_that_it_had_but_not_with_its_time(tmp_path: Path) -> None:
    sweep_in(tmp_path, "max_staleness=0,4", seeds=2)
    for seed in range(2):
        write_rows(tmp_path / "max_staleness=0" / f"seed={seed}", rows_of_run(LEARNED))
    whole, stopped = (tmp_path / "max_staleness=4" / f"seed={seed}" for seed in range(2))
    write_rows(whole, rows_of_run(LEARNED))
    write_rows(stopped, rows_of_run([0.1] * 5)[:-1])
    mark_hopeless(stopped, Hopeless(40, 0.1, 0.3))
    page, told = report_of(tmp_path)
    value = told["values"][1]
    assert (value["num_finished"], value["num_hopeless"]) == (2, 1)
    assert value["estimates"]["final_reward"]["mean"] == pytest.approx((0.9 + 0.1) / 2)
    assert value["estimates"]["train_s"]["num_seeds"] == 1
    assert (value["num_to_margin"], value["seconds_to_margin"]) == (1, None), "it never came there"
    assert told["differences"][0]["final_reward"]["compared"]["difference"] == pytest.approx(-0.4)
    assert told["differences"][0]["train_s"]["num_seeds"] == [2, 1]
    assert [line[1] for line in cells_of(page, "Learning")[1:]] == ["2 of 2", "2 of 2, 1 hopeless"]
    assert cells_of(page, "Runs")[-1][:2] == ["max_staleness=4/seed=1", "hopeless"]
    assert "1 of them were stopped as hopeless" in text_of(page)


def test_curves_have_a_band_for_each_value_and_end_with_the_shortest_run(tmp_path: Path) -> None:
    whole_sweep(tmp_path)
    page, _ = report_of(tmp_path)
    traces = figure_titled(page, "Reward by wall-clock")["data"]
    means = {trace["name"]: trace for trace in traces if trace["name"]}
    assert list(means) == [f"max_staleness = {bound}" for bound in (0, 4, 8)]
    assert means["max_staleness = 4"]["x"][-1] == pytest.approx(12 * 1.0)
    assert means["max_staleness = 4"]["y"][-1] == pytest.approx(0.901, abs=0.002)
    assert sum(trace.get("fill") == "tonexty" for trace in traces) == 3
    by_groups = figure_titled(page, "Reward by rollouts")["data"]
    assert max(trace["x"][-1] for trace in by_groups) == 24


def test_throughput_and_lag_are_plotted_by_value(tmp_path: Path) -> None:
    whole_sweep(tmp_path)
    page, _ = report_of(tmp_path)
    runs, means = figure_titled(page, "Throughput")["data"]
    assert Counter(runs["x"]) == {"0": 3, "4": 3, "8": 3}
    assert means["y"] == pytest.approx([100 / 2.01, 100 / 1.01, 100 / 1.01], rel=1e-3)
    mean, largest = figure_titled(page, "Policy lag")["data"]
    assert mean["y"] == largest["y"] == [0.0, 4.0, 8.0]


def test_runs_that_are_not_finished_are_listed_and_count_for_nothing(tmp_path: Path) -> None:
    sweep_in(tmp_path, "max_staleness=0,4", seeds=2)
    for seed in range(2):
        write_rows(tmp_path / "max_staleness=0" / f"seed={seed}", rows_of_run(LEARNED))
    write_rows(tmp_path / "max_staleness=4" / "seed=0", rows_of_run([5.0] * 5)[:-1])
    page, told = report_of(tmp_path)
    assert [run["state"] for run in told["runs"]] == ["finished", "broken off", "finished", "new"]
    assert [value["num_finished"] for value in told["values"]] == [2, 0]
    assert [difference["final_reward"] for difference in told["differences"]] == [None]
    assert "2 of 4 runs are finished; only these count." in text_of(page)
    assert [line[:2] for line in cells_of(page, "Runs")[1:]] == [
        ["max_staleness=0/seed=0", "finished"],
        ["max_staleness=4/seed=0", "broken off"],
        ["max_staleness=0/seed=1", "finished"],
        ["max_staleness=4/seed=1", "not begun"],
    ]


def test_sweep_without_runs_says_so_and_carries_no_plotly(tmp_path: Path) -> None:
    sweep_in(tmp_path, "max_staleness=0,4", seeds=1)
    page, told = report_of(tmp_path)
    assert "Nothing can be said yet: 0, the reference, has no finished run." in text_of(page)
    assert told["recommendation"]["label"] is None
    assert len(page) < 60_000


def test_report_that_cannot_be_written_names_the_folder(tmp_path: Path) -> None:
    sweep_in(tmp_path, "max_staleness=0,4", seeds=1)
    (tmp_path / "sweep.json.partial").mkdir()
    with pytest.raises(SettingError, match=r'--out = ".*": the folder cannot be written'):
        write_sweep_report(tmp_path, 0.02)


def test_one_seed_has_numbers_and_no_spread(tmp_path: Path) -> None:
    sweep_in(tmp_path, "max_staleness=0,4", seeds=1)
    for bound in (0, 4):
        write_rows(tmp_path / f"max_staleness={bound}" / "seed=0", rows_of_run(LEARNED))
    page, told = report_of(tmp_path)
    assert "one seed says nothing about the spread" in text_of(page)
    assert [line[2] for line in cells_of(page, "Learning")[1:]] == ["0.900", "0.900"]
    assert cells_of(page, "Comparisons")[1][2] == "one seed"
    assert told["differences"][0]["final_reward"]["compared"]["low"] is None
    assert not any(trace.get("fill") for trace in figure_titled(page, "Reward by rollouts")["data"])


def test_reference_is_the_smallest_bound_wherever_it_stands(tmp_path: Path) -> None:
    sweep_in(tmp_path, "learning_rate=1e-3,1e-4", "max_staleness=8,2", seeds=1)
    _, told = report_of(tmp_path)
    assert told["reference"] == "learning_rate=1e-3, max_staleness=2"


def test_reference_of_other_settings_is_their_first_value(tmp_path: Path) -> None:
    sweep_in(tmp_path, "learning_rate=1e-3,1e-4", seeds=1)
    _, told = report_of(tmp_path)
    assert told["reference"] == "1e-3"


def test_bias_alarm_of_a_run_stands_on_the_page(tmp_path: Path) -> None:
    sweep_in(tmp_path, "max_staleness=0", seeds=1)
    rows = rows_of_run(LEARNED * 10)
    groups = [row for row in rows if row["kind"] == "group"]
    long = [
        group | {"lease_id": 10_000 + group["lease_id"], "outcome": "dropped", "reason": "stale", "lengths": [500, 600]}
        for group in groups
    ]
    write_rows(tmp_path / "max_staleness=0" / "seed=0", [*rows, *long])
    page, told = report_of(tmp_path)
    alarm = told["runs"][0]["measures"]["bias_alarm"]
    assert "were dropped, and differ from the others" in alarm
    assert "Bias alarms: 1" in text_of(page)
    assert html.unescape(alarm).split(":")[0] in text_of(page)


def test_page_needs_no_network_and_links_only_to_the_runs(tmp_path: Path) -> None:
    whole_sweep(tmp_path)
    page, _ = report_of(tmp_path)

    class References(html.parser.HTMLParser):
        found: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag in ("link", "img", "iframe", "object", "base"):
                self.found.append(tag)
            self.found.extend(str(value) for name, value in attrs if name in ("src", "href", "srcset"))

    References().feed(page)
    assert len(References.found) == 9
    assert all(re.fullmatch(r"max_staleness=\d/seed=\d/report.html", link) for link in References.found)
    assert "default-src 'none'" in page


def test_values_are_not_markup(tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script>"
    plan = sweep_in(tmp_path, f"data.system_prompt='{attack}',b", "chat_template=true", seeds=1)
    for trial in plan.trials:
        write_rows(tmp_path / trial.name, rows_of_run(LEARNED))
    page, _ = report_of(tmp_path)
    assert "<script>alert" not in page
    assert page.count("</script>") == page.count("<script")


def test_plotly_accepts_every_figure(tmp_path: Path) -> None:
    import plotly.graph_objects

    whole_sweep(tmp_path)
    page, _ = report_of(tmp_path)
    figures = figures_in(page)
    assert len(figures) == 8
    for figure in figures:
        plotly.graph_objects.Figure(figure)
