"""The hub's thread: the only one that touches the hub's socket, and the link between it and the dispatcher."""

import threading
import time
from collections.abc import Callable

from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.protocols.channels import Hub
from offbeat.protocols.messages import Ack, LearnerMessage, Refused
from offbeat.protocols.wire import UnknownMessageError, WireError

TICK_S = 0.05
"""Longest time between two ticks of the dispatcher."""
RECEIVE_S = 0.01
"""Longest time of receiving between two ticks: acknowledgements and leases wait for the tick, however many messages do."""


class HubThread:
    """Serves the hub until it is closed.

    Consumes: actors' messages. Waits for: a message, `wake`, `TICK_S`. Produces: the messages of the dispatcher's send queue.
    """

    def __init__(self, hub: Hub, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._hub = hub
        self._dispatcher = dispatcher
        self._clock = clock
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Let the thread look at once for messages to send."""
        self._hub.wake()

    def close(self) -> None:
        """Send what is queued and stop serving; the hub itself stays open."""
        self._is_closed = True
        self._hub.wake()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            is_last_round = False
            while not is_last_round:
                # Read before the round: what was queued before `close` is still sent.
                is_last_round = self._is_closed
                self._hub.wait(TICK_S)
                self._receive()
                self._dispatcher.tick(self._clock())
                self._send()
        except BaseException as error:  # noqa: BLE001  a dead hub must raise in the training thread
            self._dispatcher.fail(error)

    def _receive(self) -> None:
        end = self._clock() + RECEIVE_S
        while (now := self._clock()) < end:
            received = self._hub.receive()
            if received is None:
                return
            match received.packet:
                case UnknownMessageError() as error:
                    # The message is of a newer minor version, whose sender needs no answer.
                    self._dispatcher.count_rejected(received.sender.name, str(error))
                case WireError() as error:
                    self._dispatcher.refuse(received.peer, error, received.sender)
                case packet:
                    self._dispatcher.handle(received.peer, *packet, now=now, sender=received.sender)

    def _send(self) -> None:
        for outgoing in self._dispatcher.take_outgoing():
            self._note_verdict(outgoing.peer, outgoing.message)
            if not self._hub.send(outgoing.peer, outgoing.message, *outgoing.arrays):
                self._dispatcher.unreachable(outgoing)

    def _note_verdict(self, peer: bytes, message: LearnerMessage) -> None:
        """Let the hub mute a peer whose messages are all rejected."""
        match message:
            case Ack(outcome="accepted"):
                self._hub.note_accepted(peer)
            case Ack() | Refused():
                self._hub.note_rejected(peer)
