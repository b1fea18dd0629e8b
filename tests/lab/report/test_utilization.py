"""The learner's use of its devices, in the report."""

from pathlib import Path

from tests.lab.report.test_report import report_of, step


def test_utilization_is_weighted_by_the_time_trained(tmp_path: Path):
    # 4 of 8 possible operations in the first step, 2 of 32 in the second, which makes 4 again.
    first = step(1, {"0": 3}) | {"compute/flops": 4.0, "compute/mfu": 0.5, "compute/recomputed": 0.0}
    second = step(2, {"0": 3}) | {"compute/flops": 2.0, "compute/mfu": 0.0625, "compute/recomputed": 2.0}
    assert "2,000 completion tokens in all; MFU 15%, with recomputation 25%" in report_of(tmp_path, [first, second])
    assert "MFU" not in report_of(tmp_path, [step(1, {"0": 3})])
