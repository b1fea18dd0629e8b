"""Claims about `lab.report.run_plots`: tasks are told apart where the run tells them apart."""

from offbeat.common.records.rows import StepRow
from offbeat.lab.history import fold_rows
from offbeat.lab.report.run_plots import reward_by_task, share_by_task


def test_each_task_has_a_line_where_the_run_tells_tasks_apart() -> None:
    metrics = ({"reward_by_task/sums": 0.25, "reward/mean": 0.5}, {"reward_by_task/sums": 0.75, "reward_by_task/letters": 1.0})
    rows = [StepRow(policy_version=version, metrics=of_step, time=1.0) for version, of_step in enumerate(metrics, start=1)]
    (plot,) = reward_by_task(fold_rows(rows))
    assert [(trace["name"], trace["x"], trace["y"]) for trace in plot.traces] == [
        ("letters", [2], [1.0]),
        ("sums", [1, 2], [0.25, 0.75]),
    ]
    assert reward_by_task(fold_rows([StepRow(policy_version=1, metrics={"reward/mean": 0.5}, time=1.0)])) == []


def test_each_task_has_a_line_of_its_share_where_the_run_had_a_curriculum() -> None:
    metrics = ({"curriculum/easy": 1.0, "curriculum/hard": 0.0}, {"curriculum/easy": 0.5, "curriculum/hard": 1.0})
    rows = [StepRow(policy_version=version, metrics=of_step, time=1.0) for version, of_step in enumerate(metrics, start=1)]
    (plot,) = share_by_task(fold_rows(rows))
    assert [(trace["name"], trace["x"], trace["y"]) for trace in plot.traces] == [
        ("easy", [1, 2], [1.0, 0.5]),
        ("hard", [1, 2], [0.0, 1.0]),
    ]
    assert share_by_task(fold_rows([StepRow(policy_version=1, metrics={"reward_by_task/easy": 0.5}, time=1.0)])) == []
