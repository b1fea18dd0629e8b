"""The check of whether the staleness bound lets enough episodes be under way."""

from collections.abc import Iterator
from pathlib import Path

from offbeat.common.records.rows import StepRow
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.common.settings.config import Config
from offbeat.deploy.checks.findings import Finding
from offbeat.learner.diagnostics.health import HISTORY, bound_starves


def check_episodes(config: Config) -> Iterator[Finding]:
    """Find what the run's own steps say of the bound; without any, note below which step time it is too small."""
    rows = Path(config.run.dir) / ROWS_FILE
    steps = [row for row in read_rows(rows) if isinstance(row, StepRow)] if rows.exists() else []
    if steps:
        starved = bound_starves(steps[-HISTORY:])
        if starved is not None:
            yield Finding("warning", starved)
        return
    bound = config.staleness.max_staleness
    if not config.task.environment or not bound:
        return
    longest_s = config.environment.episode_timeout_s
    yield Finding(
        "note",
        f"an episode may take {longest_s:g} s (environment.episode_timeout_s), and staleness.max_staleness = {bound} lets "
        f"{bound + 1} batches be under way: where groups take that long, the learner waits unless its steps take "
        f"{longest_s / (bound + 1):.3g} s; `offbeat status` says when the bound is too small",
    )
