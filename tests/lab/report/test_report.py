"""Claims about `lab.report.run_report`: the page's numbers are the rows', and every run gets a page."""

import html.parser
import json
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat.common.errors import SettingError
from offbeat.common.pages.figures import MAX_POINTS
from offbeat.lab.history import Interval, fold_rows, rate_over_time
from offbeat.lab.report.run_report import write_report
from tests.common.records.row_lines import rows_from

pytestmark = pytest.mark.slow

START = 1_700_000_000.0
FIGURE = '<script type="application/json" class="figure">'
"""The text before a figure's JSON."""

CONFIG = """
[model]
path = "models/tiny"
[data]
train_data = "data/copy.jsonl"
[staleness]
max_staleness = 2
[loss]
clip_low = 0.05
clip_high = 0.05
[train]
num_steps = 4
max_grad_norm = 1.0
"""


def step(version: int, lag_counts: Mapping[str, int], **numbers: Any) -> dict[str, Any]:
    row = {"kind": "step", "time": START + 2 * version, "policy_version": version, "lag/counts": dict(lag_counts)}
    row |= {"reward/mean": version / 10, "reward/zero_variance_groups": 1, "loss/grad_norm": 0.5, "lag/mean": 1.0}
    row |= {"lag/max": 2, "clip/fraction": 0.25, "clip/positive_above": 0.125, "clip/negative_below": 0.125}
    row |= {"clip/positive_below": 0.0, "clip/negative_above": 0.0, "ratio/log_mean": 0.0, "ratio/log_std": 0.01}
    row |= {"ratio/log_min": -0.1, "ratio/log_max": 0.1, "tokens/trained": 1000, "staleness/over_bound": 0}
    row |= {"time/step_s": 2.0, "time/wait_rollouts_s": 0.5, "time/train_s": 1.0, "time/publish_wait_s": 0.25}
    return row | {"time/prepare_s": 0.0, "time/snapshot_s": 0.125} | numbers


def by_lag(bucket: str, count: int, clip_fraction: float) -> dict[str, float]:
    numbers = {"count": count, "clip_fraction": clip_fraction, "ratio_log_mean": 0.01, "ratio_log_std": 0.02}
    numbers |= {"ess_sequence": 0.9, "correction_masked": 0.125, "reward_mean": 0.5, "length_mean": 15.0}
    return {f"by_lag/{bucket}/{name}": value for name, value in numbers.items()}


def group(lease_id: int, outcome: str, lengths: list[int], reason: str = "", *, lag: int = 1) -> dict[str, Any]:
    row = {"kind": "group", "time": START + 1, "lease_id": lease_id, "prompt_id": 0, "actor": "a0", "reason": reason}
    row |= {"outcome": outcome, "policy_lag": lag, "policy_version": 1, "lengths": lengths, "rewards": [0.0, 1.0]}
    return row | {"generate_s": 0.5, "num_segments": 1, "taken_at": START + 1}


def actor(name: str, seconds_in: float, tokens: int, **seconds: float) -> dict[str, Any]:
    row = {"kind": "actor", "time": START + seconds_in, "actor": name, "policy_version": 3, "seconds": seconds}
    return row | {"num_generated_tokens": tokens, "num_groups_sent": 2, "num_running_completions": 4}


def final(outcome: str = "finished", *, leased: int = 12) -> dict[str, Any]:
    books = {"leased": leased, "trained": 5, "dropped": {"stale": 2, "reward_error": 1}, "expired": 1, "in_flight": 3}
    row = {"kind": "final", "time": START + 10, "policy_version": 4, "wall_s": 10.0, "ledger": books}
    return row | {"outcome": outcome, "detail": "train.num_steps reached"}


def event(name: str, detail: str = "", actor_name: str = "") -> dict[str, Any]:
    return {"kind": "event", "time": START + 3, "event": name, "detail": detail, "actor": actor_name}


def whole_run() -> list[dict[str, Any]]:
    return [
        event("run_started", "offbeat 9.9"),
        event("actor_joined", "vllm", "a0"),
        *(group(lease_id, "trained", [10, 20]) for lease_id in range(5)),
        group(5, "dropped", [90, 80], "stale"),
        *(actor("a0", second, 500 * second, generate=0.9 * second, wait_leases=0.1 * second) for second in range(9)),
        {"kind": "weights", "time": START, "policy_version": 1, "publish_s": 0.5, "num_members": 1, "num_excluded": 0},
        {"kind": "commit", "time": START, "actor": "a0", "policy_version": 1, "stall_s": 0.01},
        {"kind": "canary", "time": START, "actor": "a0", "policy_version": 1, "max_abs_diff": 1e-5},
        {"kind": "eval", "time": START, "policy_version": 2, "reward": 0.625, "num_completions": 8, "length": 9.0}
        | {"num_failed": 0},
        step(1, {"0": 3}, **by_lag("0", 6, 0.25)),
        step(2, {"0": 1, "1": 2}, **by_lag("0", 2, 0.75), **by_lag("1", 4, 0.5)),
        step(3, {"1": 3}, **by_lag("1", 6, 0.5)),
        step(4, {"2": 3}, **by_lag("2", 6, 0.5)),
        event("actor_lost", "no heartbeat", "a0"),
        final(),
    ]


def write_rows(folder: Path, rows: Iterable[object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def report_of(folder: Path, rows: Iterable[object]) -> str:
    return write_report(write_rows(folder, rows)).read_text()


def figures_in(page: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(rf"{FIGURE}(.*?)</script>", page)]


def figure_titled(page: str, title: str) -> dict[str, Any]:
    """Return the figure under a heading."""
    match = re.search(rf"<h3>{re.escape(title)}</h3>\s*{FIGURE}(.*?)</script>", page)
    assert match, f"no figure is titled {title}"
    return json.loads(match[1])


def text_of(page: str) -> str:
    """Return the text of a page without scripts, styles and tags."""
    body = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


def sample(version: int, completion: str = "42") -> dict[str, Any]:
    row = {"kind": "sample", "time": START + 2 * version, "policy_version": version, "lease_id": version, "prompt_id": 7}
    row |= {"policy_lag": 1, "reward": 0.5, "above_mean": -0.25, "finish_reason": "length", "num_tokens": 2}
    return row | {"prompt": "6*7=", "completion": completion}


def test_samples_show_what_the_model_wrote_as_data(tmp_path: Path):
    page = report_of(tmp_path, [step(1, {"0": 1}), sample(1, "<script>alert(1)</script>\x1b[2J" + "x" * 9000)])
    assert "<script>alert" not in page and "\x1b" not in page
    text = text_of(page)
    assert "step 1: reward 0.5 (-0.25 above its group's mean)" in text
    assert "prompt 7, lag 1, 2 tokens, cut at rollout.max_new_tokens 6*7= <script>alert(1)</script>\\x1b[2Jxx" in text
    assert "x" * 1001 not in text


def test_groups_whose_steps_a_resume_undid_do_not_count_until_they_are_trained_on_again():
    first = [event("run_started"), step(1, {"1": 2}), group(0, "trained", [10]), group(1, "trained", [10]), step(2, {"1": 2})]
    again = [event("run_started"), group(1, "trained", [10], lag=2), group(2, "trained", [10], lag=2), step(2, {"2": 2})]
    assert fold_rows(rows_from([*first, *again])).groups_by_lag == {2: 2}
    # The groups of the first step are of no undone one.
    assert fold_rows(rows_from([*first, event("run_started"), step(3, {})])).groups_by_lag == {1: 2}


def test_samples_of_steps_that_a_resume_repeats_are_replaced_and_their_number_is_bounded(tmp_path: Path):
    rows = [row for version in range(1, 4) for row in (step(version, {"0": 1}), sample(version, f"first{version}"))]
    text = text_of(report_of(tmp_path, [*rows, step(2, {"0": 1}), sample(2, "again2")]))
    assert "first1" in text and "again2" in text and "first2" not in text and "first3" not in text
    many = [row for version in range(1, 100) for row in (step(version, {"0": 1}), sample(version, f"text{version}."))]
    text = text_of(report_of(tmp_path, many))
    assert [f"text{version}." in text for version in (1, 30, 31, 69, 70, 99)] == [True, True, False, False, True, True]


def evaluation_sample(version: int, prompt_id: int, completion: str, **fields: Any) -> dict[str, Any]:
    row = {"kind": "eval_sample", "time": START + 2 * version, "policy_version": version, "prompt_id": prompt_id}
    row |= {"reward": 0.5, "finish_reason": "stop", "num_tokens": 2, "prompt": "6*7=", "completion": completion}
    return row | fields


def test_samples_of_evaluations_are_data_in_the_order_of_versions_and_prompts(tmp_path: Path):
    rows = [evaluation_sample(20, 1, "last", data_set="<i>hard"), evaluation_sample(20, 0, "<script>alert(1)</script>")]
    page = report_of(tmp_path, [*rows, evaluation_sample(10, 1, "replaced"), evaluation_sample(10, 1, "again")])
    assert "<script>alert" not in page and "<i>hard" not in page
    text = text_of(page)
    assert "version 20, prompt 1 of <i>hard: reward 0.5 held out, 2 tokens, stopped 6*7= last" in text
    places = [text.index(completion) for completion in ("again", "<script>alert(1)</script>", "last")]
    assert places == sorted(places) and "replaced" not in text
    many = [evaluation_sample(version, prompt_id, f"text{version}.") for version in range(1, 100) for prompt_id in (0, 1)]
    text = text_of(report_of(tmp_path, many))
    assert [f"text{version}." in text for version in (1, 15, 16, 84, 85, 99)] == [True, True, False, False, True, True]


def test_evaluations_of_steps_that_a_resume_repeats_are_those_made_since() -> None:
    rows = [row for version in range(1, 9) for row in (step(version, {"0": 1}), evaluation(version, reward=1.0))]
    rows += [evaluation_sample(version, 0, "abandoned") for version in (3, 8)]
    rows += [event("run_started"), step(4, {"0": 1}), evaluation(4, reward=0.25), step(5, {"0": 1})]
    history = fold_rows(rows_from(rows))
    assert history.held_out_rewards == {1: 1.0, 2: 1.0, 3: 1.0, 4: 0.25}
    assert list(history.evaluation_samples) == [(3, 0)]


def test_folder_without_metrics_is_refused_by_name(tmp_path: Path):
    with pytest.raises(SettingError, match=re.escape(f'RUN = "{tmp_path}": it has no metrics.jsonl')):
        write_report(tmp_path)


def test_report_lies_in_the_folder_and_nothing_else_does(tmp_path: Path):
    folder = write_rows(tmp_path / "run", whole_run())
    assert write_report(folder) == folder / "report.html"
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "report.html"]


def test_wall_time_of_a_resumed_run_is_that_of_its_processes_without_the_time_between_them() -> None:
    killed = [{**event("run_started"), "time": START}, {**step(1, {"0": 3}), "time": START + 60}]
    told = [{**event(name), "time": START + 3599} for name in ("resumed_with_changes", "resumed", "setting_kept")]
    resumed = [*told, {**event("run_started"), "time": START + 3600}, {**step(2, {"0": 3}), "time": START + 3620}]
    ended = {**final(), "time": START + 3630, "wall_s": 40.0}
    assert fold_rows(rows_from([*killed, *resumed])).times.wall_s == 60 + 20
    assert fold_rows(rows_from([*killed, *resumed, ended])).times.wall_s == 60 + 40


def test_head_states_run_facts_and_outcome(tmp_path: Path):
    (tmp_path / "config.toml").write_text(CONFIG)
    text = text_of(report_of(tmp_path, whole_run()))
    assert "finished train.num_steps reached" in text
    assert "Model models/tiny" in text
    assert "Task data/copy.jsonl" in text
    assert "Policy version 4 of 4" in text
    assert "Wall time 10.0 s" in text
    assert "Software offbeat 9.9" in text
    assert 'path = "models/tiny"' in text, "the settings are at the end"


def test_conservation_law_is_spelled_out_with_the_numbers(tmp_path: Path):
    text = text_of(report_of(tmp_path, whole_run()))
    law = "12 leased = 5 trained + 3 dropped { stale 2, reward_error 1 } + 1 expired + 3 in flight"
    assert law in text
    assert "The law holds: 5 + 3 + 1 + 3 = 12, every lease is accounted for." in text


@pytest.mark.parametrize(
    ("leased", "verdict"),
    [(14, "= 12, not 14; 2 leases are unaccounted for."), (11, "= 12, not 11; 1 are counted twice.")],
)
def test_broken_law_is_said_aloud(tmp_path: Path, leased: int, verdict: str):
    text = text_of(report_of(tmp_path, [final(leased=leased)]))
    assert f"The law is broken: 5 + 3 + 1 + 3 {verdict}" in text


def test_trained_groups_are_counted_by_the_lag_of_their_last_pass(tmp_path: Path):
    """Two epochs over three groups, beside one that was dropped."""
    rows = [step(1, {"0": 2, "1": 1}), step(2, {"1": 2, "2": 1}), group(9, "dropped", [1], "stale", lag=7)]
    rows += [group(lease_id, "trained", [1], lag=lag) for lease_id, lag in ((3, 1), (4, 1), (5, 2))]
    page = report_of(tmp_path, rows)
    bars = figure_titled(page, "Policy lag of trained groups")["data"][0]
    assert dict(zip(bars["x"], bars["y"], strict=True)) == {1: 2, 2: 1}
    assert "1.33 steps largest 2; above the bound 0 times" in text_of(page)


def test_lengths_of_all_generated_groups_stand_beside_the_trained_ones(tmp_path: Path):
    page = report_of(tmp_path, whole_run())
    generated, trained = figure_titled(page, "Completion lengths, generated and trained")["data"]
    assert sum(generated["customdata"]) == 12
    assert sum(trained["customdata"]) == 10
    assert "mean 27 tokens generated, 15 trained" in text_of(page)


def test_drift_ledger_has_a_line_and_a_point_for_each_lag(tmp_path: Path):
    page = report_of(tmp_path, whole_run())
    text = text_of(page)
    assert "0 8 +1.00e-02 2.00e-02 0.900 37.5% 12.5% 0.500 15.0 1 10 +1.00e-02" in text
    (ratios,) = figure_titled(page, "Log-ratio by policy lag")["data"]
    assert (ratios["x"], ratios["y"]) == (["0", "1", "2"], pytest.approx([0.01] * 3))
    assert ratios["error_y"]["array"] == pytest.approx([0.02] * 3)
    clipped, masked = figure_titled(page, "Clipped and masked by policy lag")["data"]
    assert (clipped["y"], masked["y"]) == ([0.375, 0.5, 0.5], [0.125, 0.125, 0.125])
    reward, tokens = figure_titled(page, "Reward and length by policy lag")["data"]
    assert (reward["y"], tokens["y"]) == ([0.5, 0.5, 0.5], [15.0, 15.0, 15.0])


def test_steps_without_drift_by_lag_say_so(tmp_path: Path):
    assert "No step has recorded its drift by policy lag." in text_of(report_of(tmp_path, [step(1, {"0": 3})]))


def test_bias_is_compared_tested_and_said_in_a_sentence(tmp_path: Path):
    text = text_of(report_of(tmp_path, whole_run()))
    assert "leased 12 – – – generated 6 26.7/15.0/67.5" in text
    assert "trained 5 15.0/15.0/15.0" in text
    assert "dropped: stale 1 85.0/85.0/85.0" in text
    assert "in flight 3 – – –" in text
    assert "tokens 1 / 5 85.0 / 15.0 +1.00" in text
    assert "No sign of bias: the 1 (16.7%) that were dropped are too few" in text
    assert "Of 12 leases 3 were in flight at the end and 3 ended without a group: nothing is known of these." in text


def test_biased_run_raises_the_alarm(tmp_path: Path):
    rows = [group(i, "trained", [10 + i % 5]) for i in range(100)] + [
        group(100 + i, "dropped", [90], "stale") for i in range(30)
    ]
    page = report_of(tmp_path, rows)
    assert (
        "ALARM: 23.1% were dropped, and differ from the others: mean tokens 90.0 against 12.0 (effect +1.00, p = "
        in text_of(page)
    )
    assert '<p class="verdict bad">ALARM' in page


def test_rewards_of_steps_and_evaluations_are_plotted(tmp_path: Path):
    per_step, _, held_out = figure_titled(report_of(tmp_path, whole_run()), "Reward by step")["data"]
    assert (per_step["x"], per_step["y"]) == ([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4])
    assert (held_out["x"], held_out["y"]) == ([2], [0.625])


def evaluation(version: int, **fields: Any) -> dict[str, Any]:
    row = {"kind": "eval", "time": START + 2 * version, "policy_version": version, "reward": 0.5, "length": 9.0}
    return row | {"num_completions": 8, "num_failed": 0} | fields


def test_pass_at_k_and_the_rewards_of_named_sets_are_lines_over_policy_versions(tmp_path: Path):
    first = evaluation(10, pass_at={"1": 0.25, "2": 0.375, "16": 0.5}, sets={"<i>hard": 0.125, "easy": 0.75})
    page = report_of(tmp_path, [evaluation(20, pass_at={"1": 0.5, "2": 0.625}, sets={"easy": 1.0}), first])
    lines = [(line["name"], line["x"], line["y"]) for line in figure_titled(page, "Held-out pass@k")["data"]]
    assert lines == [("pass@1", [10, 20], [0.25, 0.5]), ("pass@2", [10, 20], [0.375, 0.625]), ("pass@16", [10], [0.5])]
    lines = [(line["name"], line["x"], line["y"]) for line in figure_titled(page, "Held-out reward by set")["data"]]
    assert lines == [("&lt;i&gt;hard", [10], [0.125]), ("easy", [10, 20], [0.75, 1.0])]


def test_run_without_evaluations_has_no_section_about_them(tmp_path: Path):
    assert "<h2>Evaluation</h2>" not in report_of(tmp_path, [step(1, {"0": 3})])
    page = report_of(tmp_path, [evaluation(1)])
    assert "No evaluation has measured pass@k." in text_of(page) and "Held-out reward by set" not in page


def test_clips_are_told_as_shares_of_tokens_which_an_objective_may_clip_one_by_one(tmp_path: Path):
    text = text_of(report_of(tmp_path, [step(1, {"0": 3})]))
    assert "Clipped 25.0% mean over completions" in text
    assert "Share of a completion's tokens whose ratio left the clip band" in text


def test_clips_that_noise_alone_makes_are_a_line_across_all_clips_where_the_floor_is_known(tmp_path: Path):
    without = figure_titled(report_of(tmp_path, [step(1, {"0": 3}), step(2, {"0": 3})]), "Clip fraction")["data"]
    rows = [step(1, {"0": 3}, **{"clip/noise": 0.2}), step(2, {"0": 3}, **{"clip/noise": 0.1})]
    *areas, noise = figure_titled(report_of(tmp_path, rows), "Clip fraction")["data"]
    assert areas == without
    assert noise["y"] == [0.2, 0.1]
    assert "stackgroup" not in noise


def test_time_shares_of_each_service_add_up(tmp_path: Path):
    traces = figure_titled(report_of(tmp_path, whole_run()), "Where the time went")["data"]
    shares: dict[str, dict[str, float]] = {}
    for trace in traces:
        for service, share in zip(trace["y"], trace["x"], strict=True):
            if share:
                shares.setdefault(service, {})[trace["name"]] = share
    learner = {"train": 0.5, "copy weights": 0.0625, "wait for the last publish": 0.125, "wait for rollouts": 0.25}
    assert shares["learner"] == learner | {"other": 0.0625}
    assert shares["a0"] == pytest.approx({"generate": 0.9, "wait for leases": 0.1})


def test_preparing_batches_is_time_of_its_own(tmp_path: Path):
    row = step(1, {"0": 3})
    traces = figure_titled(report_of(tmp_path, [row | {"time/prepare_s": 0.125}]), "Where the time went")["data"]
    shares = {trace["name"]: trace["x"] for trace in traces if "name" in trace}
    assert shares["prepare batches"] == [0.0625]
    assert "other" not in shares


def test_throughput_keeps_every_token(tmp_path: Path):
    generated, trained = figure_titled(report_of(tmp_path, whole_run()), "Tokens per second")["data"]
    width = 8.0 / len(generated["x"])
    assert sum(generated["y"]) * width == pytest.approx(4000)
    assert sum(trained["y"]) * width == pytest.approx(4000)


def test_steps_of_a_batch_whose_rows_are_written_at_its_end_were_made_one_after_another() -> None:
    rows = [{**step(version, {"0": 3}), "time": START + (8 if version <= 4 else 20)} for version in range(1, 9)]
    intervals = fold_rows(rows_from(rows)).training_intervals()
    starts = [interval.start - START for interval in intervals]
    assert starts == [0, 2, 4, 6, 12, 14, 16, 18]
    assert all(interval.end == interval.start + 2 and interval.num_tokens == 1000 for interval in intervals)


def test_rate_spreads_an_interval_over_the_bins_it_covers():
    edges = [0.0, 2.0, 4.0, 6.0]
    assert rate_over_time([Interval(1.0, 5.0, 40.0), Interval(0.0, 1.0, 6.0)], edges) == [8.0, 10.0, 5.0]


def test_steps_repeated_after_a_resume_count_once():
    rows = [step(1, {"0": 3}), step(2, {"1": 3}), step(3, {"2": 3}), final("stopped"), step(2, {"0": 3})]
    rows += [group(7, "trained", [1], lag=1), group(7, "trained", [1], lag=0)]
    history = fold_rows(rows_from(rows))
    assert [row.policy_version for row in history.steps] == [1, 2]
    assert history.groups_by_lag == {0: 1}
    assert history.num_groups_trained == 1
    assert history.final is None, "the resumed run has not ended"


def test_counters_of_a_restarted_actor_add_up():
    rows = [actor("a0", 0, 100, generate=1.0), actor("a0", 1, 300, generate=3.0)]
    rows += [actor("a0", 5, 50, generate=0.5), actor("a0", 6, 150, generate=1.5)]
    restarted = fold_rows(rows_from(rows)).actors["a0"]
    assert restarted.num_generated_tokens == 450
    assert restarted.num_groups_sent == 4
    assert restarted.seconds == {"generate": 4.5}
    assert [interval.num_tokens for interval in restarted.intervals()] == [200, 50, 100]


def test_page_needs_no_network(tmp_path: Path):
    (tmp_path / "config.toml").write_text(CONFIG)
    page = report_of(tmp_path, whole_run())

    class References(html.parser.HTMLParser):
        found: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag in ("link", "img", "iframe", "object", "base"):
                self.found.append(tag)
            self.found.extend(f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset"))

    References().feed(page)
    assert References.found == []
    own_text = re.sub(r"<script>/\*.*?</script>", "", page, count=1, flags=re.DOTALL)
    assert len(own_text) < 200_000, "what is left is without plotly.js"
    assert "http" not in own_text.replace("http-equiv", "")
    assert not re.search(r"url\(|@import", own_text)
    assert "default-src 'none'" in page, "and the browser is told to refuse every request"


def test_names_from_the_network_are_not_markup(tmp_path: Path):
    attack = "</script><script>alert(1)</script>"
    rows = [event(attack, attack, attack), actor(attack, 0, 1, **{attack: 1.0}), actor(attack, 1, 9, **{attack: 2.0})]
    rows += [{"kind": "canary", "time": START, "actor": attack, "policy_version": 1, "max_abs_diff": 1e-5}]
    rows += [step(1, {"0": 1}), final() | {"outcome": attack, "detail": attack}]
    (tmp_path / "config.toml").write_text(f'x = "{attack}"')
    page = report_of(tmp_path, rows)
    assert "<script>alert" not in page
    assert page.count("</script>") == page.count("<script")
    names = [trace.get("name", "") for figure in figures_in(page) for trace in figure["data"]]
    assert not any("<" in name for name in names), "Plotly reads some tags, too"


def test_unreadable_lines_are_skipped_and_counted(tmp_path: Path):
    write_rows(tmp_path, whole_run())
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\x00\xff\n[1]\n{"kind":"step","ti')
    text = text_of(write_report(tmp_path).read_text())
    assert f"from {len(whole_run())} rows of metrics.jsonl. 3 unreadable lines were skipped" in text
    assert "The law holds" in text


def test_empty_run_says_so_and_carries_no_plotly(tmp_path: Path):
    page = report_of(tmp_path, [])
    text = text_of(page)
    assert "The run has written no rows." in text
    assert "No step has been made" in text
    assert "No actor has reported." in text
    assert "The folder has no config.toml." in text
    assert len(page) < 50_000


def test_running_run_says_that_its_books_are_open(tmp_path: Path):
    rows = [group(1, "trained", [5]), group(2, "dropped", [5], "stale"), step(1, {"0": 1}) | {"time": time.time() - 5}]
    text = text_of(report_of(tmp_path, rows))
    assert "running This page shows the run so far" in text
    assert "1 groups trained and 1 dropped { stale 1 }" in text


def test_resumed_run_is_running_before_its_next_step(tmp_path: Path):
    stopped = final("stopped") | {"detail": "SIGTERM"}
    rows = [step(1, {"0": 1}), stopped, event("run_started") | {"time": time.time() - 5}]
    text = text_of(report_of(tmp_path, rows))
    assert "running This page shows the run so far" in text
    assert "The books are closed in the final row" in text


def test_killed_run_is_called_unfinished(tmp_path: Path):
    assert "unfinished The rows end" in text_of(report_of(tmp_path, [step(1, {"0": 1})]))


def test_failed_run_shows_why(tmp_path: Path):
    page = report_of(tmp_path, [final("failed") | {"detail": "no actor for 60 s"}])
    assert "failed no actor for 60 s" in text_of(page)
    assert 'class="pill bad"' in page


def test_unreadable_settings_do_not_hide_the_run(tmp_path: Path):
    (tmp_path / "config.toml").write_text("[model\npath=")
    text = text_of(report_of(tmp_path, whole_run()))
    assert "config.toml could not be read" in text
    assert "The law holds" in text


def test_long_runs_are_drawn_with_a_bounded_number_of_points(tmp_path: Path):
    page = report_of(tmp_path, (step(version, {"0": 1}) for version in range(1, 5001)))
    assert max(len(trace["x"]) for figure in figures_in(page) for trace in figure["data"]) == MAX_POINTS


def test_large_fleets_are_summed_up(tmp_path: Path):
    rows = [actor(f"a{index:03}", second, second, generate=second) for index in range(100) for second in range(3)]
    rows += [
        {"kind": "canary", "time": START, "actor": f"a{index:03}", "policy_version": 1, "max_abs_diff": index * 1e-6}
        for index in range(100)
    ]
    page = report_of(tmp_path, rows)
    bars = figure_titled(page, "Where the time went")["data"][0]["y"]
    assert bars[-1] == "60 more actors"
    canaries = figure_titled(page, "Canary: engine against learner")["data"]
    assert {trace["name"]: trace["y"] for trace in canaries} == {
        "highest of 100 actors": [99e-6],
        "median of 100 actors": [pytest.approx(49.5e-6)],
    }


def test_events_beyond_the_table_are_still_counted(tmp_path: Path):
    text = text_of(report_of(tmp_path, [event("lease_expired") for _ in range(1000)]))
    assert "lease_expired 1,000" in text
    assert "The first and the last 200 of 1,000 events." in text


def test_plotly_accepts_every_figure(tmp_path: Path):
    import plotly.graph_objects

    (tmp_path / "config.toml").write_text(CONFIG)
    page = report_of(tmp_path, whole_run())
    figures = figures_in(page)
    assert len(figures) == 16
    for figure in figures:
        plotly.graph_objects.Figure(figure)


JUNK = st.sampled_from([None, "x", -1, 0, 1e308, True, [], {}, [None, "x", -3], {"x": None}, {"1": "x"}])


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_rows_never_cost_the_report(tmp_path: Path, data: st.DataObject):
    rows = whole_run()
    for _ in range(data.draw(st.integers(1, 8))):
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        name = data.draw(st.sampled_from(sorted(row)))
        if data.draw(st.booleans()):
            row[name] = data.draw(JUNK)
        else:
            del row[name]
        if not row:
            rows.remove(row)
    assert "offbeat" in report_of(tmp_path, rows)


def test_bound_over_the_lags_is_the_one_each_step_had(tmp_path: Path) -> None:
    rows = [step(version, {"1": 3}, **{"staleness/bound": bound}) for version, bound in enumerate([4, 4, 1, 1], start=1)]
    figure = figure_titled(report_of(tmp_path, rows), "Policy lag by step")
    lines = {trace["name"]: (trace["x"], trace["y"]) for trace in figure["data"]}
    assert lines["max_staleness"] == ([1, 2, 3, 4], [4, 4, 1, 1])
    # A run from before steps told it.
    assert "max_staleness" not in {
        trace["name"] for trace in figure_titled(report_of(tmp_path, whole_run()), "Policy lag by step")["data"]
    }
