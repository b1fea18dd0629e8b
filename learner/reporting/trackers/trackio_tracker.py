"""A run in trackio: in its local database, or where TRACKIO_SERVER_URL or TRACKIO_SPACE_ID say."""

from pathlib import Path

from offbeat.common.records.rows import EvalRow, Row, StepRow
from offbeat.common.records.writer import scalars_of
from offbeat.learner.reporting.trackers.tracker import Opening, keep_id, make_id, read_id


class TrackioTracker:
    """The run of this name, by which trackio finds a run again."""

    def __init__(self, opening: Opening) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        # Folders of equal names are runs of their own.
        name = read_id(opening) or keep_id(opening, f"{Path(opening.folder).name}-{make_id()[:8]}")
        self._run = trackio.init(opening.project, name, config=dict(opening.settings), resume="allow", embed=False)

    def add(self, row: Row) -> None:
        """Log the row's numbers."""
        if isinstance(row, StepRow | EvalRow):
            self._run.log(scalars_of(row), step=row.policy_version)

    def close(self, outcome: str | None) -> None:
        """Write or send the rest; trackio knows no outcomes."""
        self._run.finish()
