"""The reference pages in `docs/` say what the code says."""

from pathlib import Path

import pytest

from docs.generate.reference import metrics_page, resuming_page, settings_page, write_pages
from offbeat.common.records.rows import ROW_TYPES
from offbeat.common.records.step_metrics import ROUTING_METRICS, STEP_METRICS
from offbeat.common.settings.loading import explanations

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "name",
    [
        "metrics.md",
        "settings.md",
        "health.md",
        "resuming.md",
        "monitoring.md",
        "monitoring/grafana.json",
        "monitoring/alerts.yaml",
    ],
)
def test_page_is_fresh(tmp_path: Path, name: str) -> None:
    write_pages(tmp_path)
    assert (DOCS / name).read_text() == (tmp_path / name).read_text(), "run `python -m docs.generate.reference docs`"


def test_metrics_page_has_every_kind_of_row_and_every_metric() -> None:
    page = metrics_page()
    assert all(f"### `{row_type.__struct_config__.tag}`" in page for row_type in ROW_TYPES)
    assert all(f"| `{metric.name}` |" in page for metric in (*STEP_METRICS, *ROUTING_METRICS))


def test_settings_page_has_every_setting_with_its_text() -> None:
    page = settings_page()
    for row in explanations():
        assert f"| `{row.setting}` |" in page
        assert row.text.replace("|", "\\|") in page


def test_rows_of_tables_have_as_many_cells_as_their_heads() -> None:
    for page in (metrics_page(), settings_page(), resuming_page()):
        for table in page.split("\n\n"):
            if table.startswith("|"):
                assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1
