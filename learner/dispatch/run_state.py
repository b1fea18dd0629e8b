"""State that the dispatcher's parts share: the policy versions, and what may end the run (failed leases, a spent budget)."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from offbeat.common.errors import ServiceError
from offbeat.common.records.rows import ActorRow, OtherRow, Recorder, Row
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.common.settings.config import Config
from offbeat.learner.leases.prompts import MAX_LEASE_ATTEMPTS


@dataclass
class Versions:
    """Policy versions in optimizer steps. The dispatcher changes them; its parts only read them."""

    current: int
    """The version that is trained now."""
    newest: int
    """The newest version that any learner process of this run has made; at least `current`."""
    published: int | None = None
    """The newest version on its way to the actors; None before this process has published one."""
    evaluated: int = -1
    """The newest version that an earlier process of the run has evaluated; -1 for none."""

    def __post_init__(self) -> None:
        self.newest = max(self.newest, self.current)

    def advance(self, policy_version: int) -> None:
        """Move to the version that training has reached."""
        self.current = policy_version
        self.newest = max(self.newest, policy_version)


class RunFailedError(ServiceError):
    """The run cannot go on; the text says why and what to do."""


class LeaseFailures:
    """Owns both counts of failed leases, and the error that ends the run."""

    def __init__(self, max_failed_leases: int, wake: Callable[[], None]) -> None:
        """`wake` is called when the run must end: the training thread may wait for groups."""
        self.error: BaseException | None = None
        """The error that the training thread must raise."""
        self._max_failed_leases = max_failed_leases
        self._wake = wake
        self._by_prompt: Counter[int] = Counter()
        """Failed attempts of the prompts that are to be tried again."""
        self.num_in_a_row = 0
        """Failed leases since the last good group."""
        self.last = ""
        """The last failure in words."""

    def is_last_attempt(self, prompt_id: int) -> bool:
        """Return whether a prompt is given up if it fails once more."""
        return self._by_prompt[prompt_id] + 1 >= MAX_LEASE_ATTEMPTS

    def count_attempt(self, prompt_id: int) -> int:
        """Count a failed attempt and return the number of them; a prompt that is given up starts anew in the next epoch."""
        self._by_prompt[prompt_id] += 1
        num_attempts = self._by_prompt[prompt_id]
        if num_attempts >= MAX_LEASE_ATTEMPTS:
            del self._by_prompt[prompt_id]
        return num_attempts

    def count_lease(self, last: str) -> None:
        """Count a failed lease; end the run when `run.max_failed_leases` have failed without a good group between them.

        `last` says how this lease failed.
        """
        self.num_in_a_row += 1
        self.last = last
        if self.num_in_a_row >= self._max_failed_leases:
            self.end_run(
                RunFailedError(f"the last {self.num_in_a_row} leases failed (run.max_failed_leases), the last one with {last}")
            )

    def note_good_group(self) -> None:
        """End a row of failed leases: a group was good, of a training prompt or a held-out one."""
        self.num_in_a_row = 0

    def end_run(self, error: BaseException) -> None:
        """Make the training thread raise this error."""
        self.error = error
        self._wake()

    def forget(self, prompt_id: int) -> None:
        """Forget the failed attempts of a training prompt after a good group of it."""
        self._by_prompt.pop(prompt_id, None)


class JudgeBudget:
    """Adds up what the rows of actors tell. An actor's counts only grow; where they fall it was started again."""

    def __init__(self, budget_tokens: int, failures: LeaseFailures, earlier: Iterable[Row | OtherRow] = ()) -> None:
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


def within_budget(config: Config, failures: LeaseFailures, record: Recorder) -> Recorder:
    """Return the recorder of actors' rows for a run; without a budget the one that was given."""
    budget_tokens = config.judge.budget_tokens
    if not config.judge.url or budget_tokens is None:
        return record
    earlier = read_rows(Path(config.run.dir) / ROWS_FILE) if config.run.resume else ()
    return JudgeBudget(budget_tokens, failures, earlier).noting(record)
