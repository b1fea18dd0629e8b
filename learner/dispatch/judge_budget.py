"""The budget of the judge: tokens over all actors and restarts of the run, and the end of the run when they are spent."""

from collections.abc import Iterable
from pathlib import Path

from offbeat.common.records.rows import ActorRow, OtherRow, Recorder, Row
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.common.settings.config import Config
from offbeat.learner.dispatch.failures import Failures, RunFailedError


class JudgeBudget:
    """Adds up what the rows of actors tell. An actor's counts only grow; where they fall it was started again."""

    def __init__(self, budget_tokens: int, failures: Failures, earlier: Iterable[Row | OtherRow] = ()) -> None:
        """`earlier` are the rows of the run's earlier learner processes."""
        self._budget_tokens = budget_tokens
        self._failures = failures
        self._last: dict[str, float] = {}
        self.spent_tokens = 0.0
        for row in earlier:
            self._add(row)

    def noting(self, record: Recorder) -> Recorder:
        """Return a recorder that looks at the rows of actors too, and ends the run when the budget is spent."""

        def record_and_note(row: Row) -> None:
            record(row)
            self._add(row)
            if self.spent_tokens >= self._budget_tokens and self._failures.error is None:
                spent = f"judgements have taken {self.spent_tokens:.0f} tokens (judge.budget_tokens = {self._budget_tokens})"
                self._failures.end_run(RunFailedError(f"{spent}: raise the budget and resume the run, or set judge.cache"))

        return record_and_note

    def _add(self, row: Row | OtherRow) -> None:
        if not isinstance(row, ActorRow) or not row.judge:
            return
        tokens, last = row.judge.get("tokens", 0.0), self._last.get(row.actor, 0.0)
        self._last[row.actor] = tokens
        self.spent_tokens += tokens - last if tokens >= last else tokens


def within_budget(config: Config, failures: Failures, record: Recorder) -> Recorder:
    """Return the recorder of actors' rows for a run; without a budget the one that was given."""
    budget_tokens = config.judge.budget_tokens
    if not config.judge.url or budget_tokens is None:
        return record
    rows = Path(config.run.dir) / ROWS_FILE
    earlier = read_rows(rows) if config.run.resume and rows.exists() else ()
    return JudgeBudget(budget_tokens, failures, earlier).noting(record)
