"""Failed leases, by prompt and in a row, and the error that ends a run which cannot succeed."""

from collections import Counter
from collections.abc import Callable

from offbeat.common.errors import ServiceError


class RunFailedError(ServiceError):
    """The run cannot go on; the text says why and what to do."""


class Failures:
    """Owns both counts of failed leases, and the error that ends the run."""

    def __init__(self, max_lease_attempts: int, max_failed_leases: int, wake: Callable[[], None]) -> None:
        """`wake` is called when the run must end: the training thread may wait for groups."""
        self.error: BaseException | None = None
        """The error that the training thread must raise."""
        self._max_lease_attempts = max_lease_attempts
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
        return self._by_prompt[prompt_id] + 1 >= self._max_lease_attempts

    def count_attempt(self, prompt_id: int) -> int:
        """Count a failed attempt and return the number of them; a prompt that is given up starts anew in the next epoch."""
        self._by_prompt[prompt_id] += 1
        num_attempts = self._by_prompt[prompt_id]
        if num_attempts >= self._max_lease_attempts:
            del self._by_prompt[prompt_id]
        return num_attempts

    def count_lease(self, last: str) -> None:
        """Count a failed lease; end the run when `train.max_failed_leases` have failed without a good group between them.

        `last` says how this lease failed.
        """
        self.num_in_a_row += 1
        self.last = last
        if self.num_in_a_row >= self._max_failed_leases:
            self.end_run(
                RunFailedError(
                    f"the last {self.num_in_a_row} leases failed (train.max_failed_leases), the last one with {last}"
                )
            )

    def end_run(self, error: BaseException) -> None:
        """Make the training thread raise this error."""
        self.error = error
        self._wake()

    def forget(self, prompt_id: int) -> None:
        """Start both counts anew after a good group of this prompt."""
        self.num_in_a_row = 0
        self._by_prompt.pop(prompt_id, None)
