"""Claims about `lab.drift`: the drift ledger is the steps' numbers pooled, and the sentences say what the rows show."""

import io
import json
import math
import re
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from offbeat.common.errors import SettingError
from offbeat.deploy.cli.main import make_app
from offbeat.lab.drift import drift_report, ended_leases, part_head, part_rows, print_drift, render_drift
from offbeat.lab.history import RunHistory, TurnDrift, fold_rows
from offbeat.lab.report.run_report import write_report
from offbeat.learner.diagnostics.length_bias import EndedLease
from tests.common.records.row_lines import rows_from

START = 1_700_000_000.0


def step(version: int, **by_lag: dict[str, float]) -> dict[str, Any]:
    """Return a step's row; `lag0={...}` are its metrics of bucket 0, `lag3_4` those of bucket 3-4."""
    row: dict[str, Any] = {"kind": "step", "time": START + version, "policy_version": version, "lag/counts": {}}
    for bucket, numbers in by_lag.items():
        name = bucket.removeprefix("lag").replace("_up", "+").replace("_", "-")
        row |= {f"by_lag/{name}/{metric}": value for metric, value in numbers.items()}
    return row


def group(lease_id: int, length: int, *, taken_at: float, outcome: str = "trained") -> dict[str, Any]:
    row = {"kind": "group", "time": START + taken_at, "lease_id": lease_id, "outcome": outcome, "lengths": [length, length]}
    row |= {"prompt_id": 0, "actor": "a0", "policy_version": 1, "policy_lag": 1, "num_segments": 1}
    row |= {"reason": "" if outcome == "trained" else "stale", "rewards": [0.0, 1.0], "generate_s": length / 10}
    return row | {"taken_at": START + taken_at}


def event(name: str, lease_id: int, detail: str = "", **fields: float) -> dict[str, Any]:
    return {"kind": "event", "time": START + 1, "event": name, "lease_id": lease_id, "detail": detail, **fields}


def final(**books: Any) -> dict[str, Any]:
    ledger = {"leased": 0, "trained": 0, "dropped": {}, "expired": 0, "in_flight": 0} | books
    return {"kind": "final", "time": START + 9, "policy_version": 1, "wall_s": 9.0, "ledger": ledger, "outcome": "finished"} | {
        "detail": ""
    }


def biased() -> list[dict[str, Any]]:
    """Return 400 groups. Of every four one is long and dropped, and one is longer than the other two and trained on late."""
    rows = []
    for index in range(400):
        length = (90, 30, 10, 10)[index % 4] + index % 7
        taken_at = index // 4 + (1.5 if index % 4 == 1 else 0)
        rows.append(group(index, length, taken_at=taken_at, outcome="trained" if index % 4 else "dropped"))
    return sorted(rows, key=lambda row: row["time"])


def in_order() -> list[dict[str, Any]]:
    return [group(index, 90 if index % 4 == 0 else 10, taken_at=index // 4) for index in range(400)]


def history_of(rows: list[dict[str, Any]]) -> RunHistory:
    return fold_rows(rows_from(rows))


def shown(history: RunHistory) -> str:
    console = Console(file=io.StringIO(), width=150)
    console.print(render_drift(drift_report(history)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_drift_of_two_steps_is_pooled_by_hand():
    first = {"count": 4, "ratio_log_mean": 0.1, "ratio_log_std": 0.3, "ess_sequence": 0.5, "clip_fraction": 0.25}
    first |= {"correction_masked": 0.5, "reward_mean": 1.0, "length_mean": 10.0}
    second = {"count": 12, "ratio_log_mean": 0.5, "ratio_log_std": 0.1, "ess_sequence": 0.9, "clip_fraction": 0.75}
    second |= {"correction_masked": 0.1, "reward_mean": 0.0, "length_mean": 30.0}
    (line,) = history_of([step(1, lag3_4=first), step(2, lag3_4=second)]).drift_by_lag
    assert (line.bucket, line.count) == ("3-4", 16)
    assert line.log_ratio_mean == pytest.approx(0.4)
    # Mean of the variances (4 * 0.09 + 12 * 0.01) / 16 = 0.03, variance of the means (4 * 0.09 + 12 * 0.01) / 16 = 0.03.
    assert line.log_ratio_std == pytest.approx(math.sqrt(0.06))
    assert line.ess == pytest.approx(0.8)
    assert line.clip_fraction == pytest.approx(0.625)
    # By tokens: (40 * 0.5 + 360 * 0.1) / 400.
    assert line.masked == pytest.approx(0.14)
    assert line.reward == pytest.approx(0.25)
    assert line.length == pytest.approx(25.0)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=6))
def test_pooled_spread_is_that_of_all_completions(log_ratios: list[list[float]]):
    rows = [
        step(version, lag2={"count": len(values), "ratio_log_mean": fmean(values), "ratio_log_std": pstdev(values)})
        for version, values in enumerate(log_ratios)
    ]
    (line,) = history_of(rows).drift_by_lag
    together = [value for values in log_ratios for value in values]
    assert line.log_ratio_mean == pytest.approx(fmean(together), abs=1e-9)
    assert line.log_ratio_std == pytest.approx(pstdev(together), abs=1e-7)


def test_buckets_are_in_the_order_of_their_lags_and_steps_without_one_do_not_count():
    one = {"count": 1, "reward_mean": 1.0}
    rows = [step(1, lag9_up=one, lag0=one), step(2, lag5_8=one, lag0={"count": 3, "reward_mean": 5.0}), step(3, lag3_4=one)]
    lines = history_of(rows).drift_by_lag
    assert [(line.bucket, line.count, line.reward) for line in lines] == [
        ("0", 4, 4.0),
        ("3-4", 1, 1.0),
        ("5-8", 1, 1.0),
        ("9+", 1, 1.0),
    ]
    assert lines[0].log_ratio_mean is None
    assert lines[0].masked is None


def test_leases_end_in_the_order_of_time_those_without_a_group_included():
    rows = [
        group(3, 10, taken_at=4.0),
        event("lease_expired", 1, "no group within 60 s", after_s=60.0),
        event("lease_aborted", 2, "too stale to be trained on"),
        event("lease_expired", 4, "actor_lost", after_s=15.0),
        event("lease_expired", 3, "the learner was restarted, and then it came all the same"),
        event("actor_joined", 5),
        group(0, 20, taken_at=0.5, outcome="dropped"),
    ]
    ended = ended_leases(history_of(rows))
    assert [(lease.lease_id, lease.outcome, lease.reason) for lease in ended] == [
        (0, "dropped", "stale"),
        (1, "expired", "no group within 60 s"),
        (2, "dropped", "aborted"),
        (4, "expired", "actor_lost"),
        (3, "trained", ""),
    ]
    assert ended[1].duration_s == 60.0
    assert math.isnan(ended[3].duration_s), "that its actor was silent for long is no sign of a long group"
    assert ended[4] == EndedLease(3, "trained", "", 10.0, 1.0, 0.5, START + 4)


def test_long_groups_that_were_dropped_are_an_alarm():
    history = history_of(biased())
    (alarm, late, unknown) = drift_report(history).verdict
    assert alarm.startswith("ALARM: 25.0% were dropped, and differ from the others: mean tokens 93.0 against ")
    assert "with length +0." in late
    assert unknown.startswith("Leases that are still in flight are not in this comparison")
    assert "dropped / trained" in shown(history)


def test_groups_trained_in_their_order_are_no_sign_of_bias():
    rows = [*in_order(), final(leased=400, trained=400)]
    assert drift_report(history_of(rows)).verdict == [
        "No sign of bias: no lease with signal was dropped.",
        "All 400 leases are in this comparison.",
    ]
    assert "Tests of bias" not in shown(history_of(rows)), "with nothing to compare"


def test_what_nothing_is_known_of_is_said():
    rows = [*in_order(), final(leased=410, trained=400, dropped={"reward_error": 3}, in_flight=7)]
    history = history_of(rows)
    sentence = "Of 410 leases 7 were in flight at the end and 3 ended without a group: nothing is known of these."
    assert drift_report(history).verdict[-1] == sentence
    text = shown(history)
    assert re.search(r"leased +410 +– +– +–\s+generated +400 .*\s+trained +400 .*\s+in flight +7 +– +– +–", text), text


def test_few_drops_are_named_and_no_alarm():
    rows = in_order()
    rows[8] |= {"outcome": "dropped", "reason": "stale"}
    (first, _) = drift_report(history_of(rows)).verdict
    assert first.startswith("No sign of bias: the 1 (0.2%) that were dropped are too few or too like the others to matter (")


def test_run_without_groups_has_nothing_to_compare():
    report = drift_report(history_of([]))
    assert report.verdict == ["No group has been trained on: there is nothing to compare."]
    assert "No step has recorded its drift" in shown(history_of([]))


def test_folder_without_metrics_is_refused(tmp_path: Path):
    with pytest.raises(SettingError, match=r"it has no metrics\.jsonl"):
        print_drift(tmp_path, as_json=False)


def test_command_prints_tables_and_json(tmp_path: Path):
    metrics = {"count": 4, "ratio_log_mean": 0.01, "ratio_log_std": 0.02, "ess_sequence": 0.5, "clip_fraction": 0.25}
    rows = [step(1, lag0=metrics | {"reward_mean": 0.5, "length_mean": 12.0}), *biased()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = CliRunner().invoke(make_app(), ["drift", str(tmp_path)]).output
    assert "+1.00e-02" in text
    assert "ALARM" in text
    told = json.loads(CliRunner().invoke(make_app(), ["drift", str(tmp_path), "--json"]).output)
    assert told["by_lag"][0]["clip_fraction"] == 0.25
    assert told["by_lag"][0]["masked"] is None
    assert told["bias"]["alarm"]
    assert told["books"] is None


def test_turns_have_columns_in_a_run_of_episodes_alone() -> None:
    rows = in_order()
    assert "turns" not in shown(history_of(rows))
    for row in rows:
        row |= {"num_turns": [2, 4], "environment_s": [0.5, 1.5]}
    history = history_of(rows)
    assert part_head(drift_report(history).bias)[-2:] == ("turns: mean/median/p95", "environment's seconds: mean/median/p95")
    assert part_rows(drift_report(history).bias, None)[0][-2:] == ("3.0/3.0/3.0", "1.00/1.00/1.00")


def test_turns_have_a_table_of_their_tokens_in_a_run_of_episodes_alone(tmp_path: Path) -> None:
    assert "Drift by turn" not in shown(history_of(in_order()))
    steps = [step(1), step(2), step(3)]
    for row, tokens, lag, k3 in ((steps[0], 10, 1.0, 0.25), (steps[2], 30, 3.0, 0.75)):
        row |= {"by_turn/1/tokens": tokens, "by_turn/1/lag_mean": lag, "by_turn/1/kl_behavior_policy_k3": k3}
    steps[1] |= {"by_turn/9+/tokens": 5, "by_turn/3-4/tokens": 7, "by_turn/9+/lag_mean": 0.5}
    history = history_of(steps)
    assert history.drift_by_turn == [
        TurnDrift("1", 40, 2.5, 0.625),
        TurnDrift("3-4", 7, None, None),
        TurnDrift("9+", 5, 0.5, None),
    ]
    assert "6.25e-01" in shown(history)
    for rows, is_told in ((steps, True), (in_order(), False)):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, step(4, lag0={"count": 1})]))
        assert ("token lag" in write_report(tmp_path).read_text()) is is_told
