"""The report draws the bounds of a ratio beside it, and no others."""

from pathlib import Path

import pytest

from tests.lab.report.test_report import CONFIG, figure_titled, report_of, whole_run


def test_clip_band_is_dashed_at_the_logs_of_its_bounds(tmp_path: Path):
    (tmp_path / "config.toml").write_text(CONFIG.replace("clip_high = 0.05", "clip_high = 0.25"))
    layout = figure_titled(report_of(tmp_path, whole_run()), "Sequence log-ratio")["layout"]
    lines = [(shape["y0"], shape["y1"]) for shape in layout["shapes"]]
    assert lines == [pytest.approx((-0.0512933, -0.0512933)), pytest.approx((0.2231436, 0.2231436))]
    names = [(text["text"], text["y"], text["yanchor"]) for text in layout["annotations"]]
    assert names == [("1 − clip_low", lines[0][0], "top"), ("1 + clip_high", lines[1][0], "bottom")]


def test_bounds_of_a_divergence_are_not_drawn_beside_the_ratio(tmp_path: Path):
    (tmp_path / "config.toml").write_text(CONFIG.replace("[loss]", '[loss]\nobjective = "dppo_tv"'))
    assert not figure_titled(report_of(tmp_path, whole_run()), "Sequence log-ratio")["layout"].get("shapes")
