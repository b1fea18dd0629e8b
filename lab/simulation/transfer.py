"""The weights of a simulated run: which version is published, on its way, and in the actors' engines."""

from offbeat.lab.simulation.actors import SimulatedActors
from offbeat.lab.simulation.clock import EventKind, WorkClock
from offbeat.lab.simulation.timings import Draws


class WeightTransfer:
    """Sends the newest published version to all actors at once, one transfer after another.

    publish -> WEIGHTS_ARRIVE (all sampling stops) -> WEIGHTS_ARE_COMMITTED -> WEIGHTS_ARE_CHECKED (sampling goes on)
    """

    def __init__(
        self, clock: WorkClock, actors: SimulatedActors, sync_s: Draws[float], *, swap_s: float, check_s: float
    ) -> None:
        self._clock = clock
        self._actors = actors
        self._sync_s = sync_s
        self._swap_s = swap_s
        self._check_s = check_s
        self._published_version = 0
        self._sending_version: int | None = None
        self.committed_version: int | None = None
        """The version in the actors' engines; None before the first."""

    def publish(self, policy_version: int) -> None:
        """Send this version, after the transfer that is under way."""
        self._published_version = policy_version
        if self._sending_version is None:
            self._send()

    def arrive(self) -> None:
        """Stop the actors and swap the version in that arrived."""
        assert self._sending_version is not None
        pause_s = self._swap_s + self._check_s
        if pause_s:
            self._clock.schedule_after(pause_s, EventKind.WEIGHTS_ARE_CHECKED)
        self._actors.begin_swap(self._sending_version, pause_s)
        self._clock.schedule_after(self._swap_s, EventKind.WEIGHTS_ARE_COMMITTED)

    def commit(self) -> None:
        """Let leases begin under the version that was swapped in, and send the next one that is published."""
        self.committed_version, self._sending_version = self._sending_version, None
        assert self.committed_version is not None
        if self.committed_version < self._published_version:
            self._send()

    def _send(self) -> None:
        self._sending_version = self._published_version
        self._clock.schedule_after(self._sync_s.draw(), EventKind.WEIGHTS_ARRIVE)
