"""The learner's end of the hub for its other threads: the actors present, messages to them, and the farewell."""

import logging

from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.hub_thread import HubThread
from offbeat.learner.leases.ledger import LedgerCounts
from offbeat.learner.weights.standings import Recipient
from offbeat.protocols.messages import LearnerMessage, StatusReport

logger = logging.getLogger(__name__)


class ActorLink:
    """The dispatcher and the thread that serves it."""

    def __init__(self, dispatcher: Dispatcher, hub_thread: HubThread, leave_timeout_s: float) -> None:
        """Wait up to `leave_timeout_s`, at the end, for actors to say goodbye."""
        self._dispatcher = dispatcher
        self._hub_thread = hub_thread
        self._leave_timeout_s = leave_timeout_s

    def start(self) -> None:
        """Mark in the log that this process takes over, and begin to serve actors."""
        self._dispatcher.begin()
        self._hub_thread.start()

    def recipients(self) -> list[Recipient]:
        """Return the live actors, with the versions that they committed."""
        return [Recipient(*member) for member in self._dispatcher.members()]

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        """Send a message to the actor at this address, soon."""
        self._dispatcher.post(peer, message)
        self._hub_thread.wake()

    def status(self) -> StatusReport:
        """Return the state of the run, as `offbeat status` shows it."""
        return self._dispatcher.status_report()

    def silence_s(self) -> float:
        """Return the seconds since the hub's thread last turned."""
        return self._dispatcher.silence_s()

    def fail(self, error: BaseException) -> None:
        """Make the training thread raise this."""
        self._dispatcher.fail(error)

    def close(self, reason: str) -> LedgerCounts:
        """Tell every actor that the run is over and why, stop serving, and return what became of the leases."""
        self._dismiss(reason)
        return self.pause()

    def pause(self) -> LedgerCounts:
        """Stop serving, and return what became of the leases; the actors keep theirs, and look for the next learner."""
        self._hub_thread.close()
        return self._dispatcher.counts()

    def _dismiss(self, reason: str) -> None:
        self._dispatcher.stop(reason)
        self._hub_thread.wake()
        # Messages that an actor has not read when the connection closes are lost; it would wait for a learner that is gone.
        if not self._dispatcher.wait_left(self._leave_timeout_s):
            names = [recipient.name for recipient in self.recipients()]
            logger.warning("actors that did not leave within %g s: %s", self._leave_timeout_s, names)
