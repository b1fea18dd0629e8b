"""A run in Weights & Biases, with a table of its newest samples."""

from collections import deque
from pathlib import Path
from typing import Any

from offbeat.common.records.rows import EvalRow, Row, SampleRow, StepRow, row_fields
from offbeat.common.records.writer import scalars_of
from offbeat.learner.reporting.trackers.tracker import Opening, keep_id, make_id, read_id

MAX_TABLE_SAMPLES = 100
"""Rows of the table of samples; older ones leave it."""

_SAMPLE_COLUMNS = tuple(name for name in SampleRow.__struct_fields__ if name != "time")


class WandbTracker:
    """The run with this id; the library chooses server and account by its own variables."""

    def __init__(self, opening: Opening) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        run_id = read_id(opening) or keep_id(opening, make_id())
        folder = Path(opening.folder)
        config = {"offbeat": opening.settings}
        self._run = wandb.init(project=opening.project, name=folder.name, dir=folder, id=run_id, resume="allow", config=config)
        self._run.define_metric("*", step_metric="policy_version")
        self._table: Any = wandb.Table
        self._samples: deque[SampleRow] = deque(maxlen=MAX_TABLE_SAMPLES)

    def add(self, row: Row) -> None:
        """Log the row's numbers, or replace the table of samples by one with this sample."""
        # Without `step=`: W&B drops rows behind its newest step, and an evaluation always is.
        if isinstance(row, StepRow | EvalRow):
            self._run.log({"policy_version": row.policy_version, **scalars_of(row)})
        elif isinstance(row, SampleRow):
            self._samples.append(row)
            cells = [[row_fields(sample).get(name) for name in _SAMPLE_COLUMNS] for sample in self._samples]
            table = self._table(columns=[*_SAMPLE_COLUMNS], data=cells)
            self._run.log({"policy_version": row.policy_version, "samples": table})

    def close(self, outcome: str | None) -> None:
        """Upload the rest; W&B knows runs that finished and runs that failed."""
        self._run.finish(exit_code=0 if outcome in ("finished", "stopped", "paused") else 1)
