"""The connection to actors: the sockets that are bound, the thread that serves the hub, and the link for other threads.

actors <-> Hub <-> HubThread <-> Dispatcher <- ActorLink <- weight publisher, the end of the run
"""

import logging
import sys
import threading
import time
from collections.abc import Callable

from offbeat.common.errors import SettingError, pass_on
from offbeat.common.processes.files import replace
from offbeat.common.records.rows import LedgerSums
from offbeat.common.settings.config import Config
from offbeat.common.settings.hub_keys import keys_of_learner
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.protocols.addresses import address_file, host_of, reachable
from offbeat.protocols.channels import Hub
from offbeat.protocols.connection_limits import FILES_PER_PEER
from offbeat.protocols.messages import HEARTBEAT_S, Ack, LearnerMessage, Refused
from offbeat.protocols.wire import UnknownMessageError, WireError

logger = logging.getLogger(__name__)

REBIND_S = 60.0
"""Seconds for which a learner that resumes tries to bind a hub address that another process has taken."""
CHUNK_REQUEST_BYTES = 4096
"""Longest message to the weight server."""
TICK_S = 0.05
"""Longest time between two ticks of the dispatcher."""
RECEIVE_S = 0.01
"""Longest time of receiving between two ticks: acknowledgements and leases wait for the tick, however many messages do."""
SWITCH_S = 1e-4
"""Longest time for which another thread's Python may keep the hub's thread from going on. It lets others run at each call of
its socket, four times a group. With Python's 5 ms it would take in few groups while the training thread prepares a batch."""


def open_hub(config: Config) -> Hub:
    """Bind the hub; raise `SettingError` where that cannot be done."""
    return Hub(
        config.hub.bind or config.hub.address,
        max_message_bytes=config.hub.max_message_mb << 20,
        keys=keys_of_learner(config.hub),
        # A restart finds actors waiting at the address, and whatever took it meanwhile may leave.
        patience_s=REBIND_S if config.run.resume else 0.0,
    )


def open_weight_hub(config: Config) -> Hub:
    """Bind the socket at which actors pull weights, on the hub's interface."""
    keys = keys_of_learner(config.hub)
    interface = (config.hub.bind or config.hub.address).rpartition(":")[0]
    address = f"{interface}:{config.weights.pull_port or '*'}"
    return Hub(address, max_message_bytes=CHUNK_REQUEST_BYTES, keys=keys, port_setting="weights.pull_port")


def publish_address(setting: str, bound: str) -> str:
    """Return the host at which actors reach the learner, after writing the address into a file that `hub.address` names."""
    file = address_file(setting)
    if file is None:
        return host_of(setting)
    address = reachable(bound)
    try:
        replace(file, f"{address}\n".encode())
    except OSError as error:
        problem = f"the file cannot be written ({error.strerror})"
        cure = "Name a file in a folder that exists and all machines see."
        raise SettingError("hub.address", setting, problem, cure) from error
    logger.info("actors find the hub at %s, as %s says", address, file)
    return host_of(address)


def max_peers(config: Config, hub: Hub) -> int:
    """Return how many actors the limit on open files leaves room for; warn when `hub.max_actors` are more."""
    if hub.connections.max_known < config.hub.max_actors:
        logger.warning(
            "this process may open too few files for hub.max_actors = %d: %d actors at most can join. Raise the limit of this "
            "machine (ulimit -Hn) to %d, or lower the setting",
            *(config.hub.max_actors, hub.connections.max_known, FILES_PER_PEER * config.hub.max_actors),
        )
    return hub.connections.max_known


def hub_rejections(hub: Hub) -> dict[str, int]:
    """Return how many connections and messages the hub rejected, by reason; for the hub's thread."""
    connections = {
        "connections without an allowed key": hub.connections.num_refused,
        "connections that said nothing, closed to make room": hub.connections.num_closed,
    }
    return dict(hub.num_dropped) | {what: number for what, number in connections.items() if number}


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
        """Start the thread; from then on the threads of this process take shorter turns (`SWITCH_S`)."""
        sys.setswitchinterval(SWITCH_S)
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
            pass_on(error, self._dispatcher.fail)

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
        if isinstance(message, Ack | Refused):
            self._hub.note_verdict(peer, is_good=isinstance(message, Ack) and message.outcome == "accepted")


class ActorLink:
    """The dispatcher and the thread that serves it."""

    def __init__(self, dispatcher: Dispatcher, hub_thread: HubThread, dead_after_s: float) -> None:
        self._dispatcher = dispatcher
        self._hub_thread = hub_thread
        # An actor that is cut off may be back before it counts as dead.
        self._leave_timeout_s = dead_after_s + HEARTBEAT_S

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

    def fail(self, error: BaseException) -> None:
        """Make the training thread raise this."""
        self._dispatcher.fail(error)

    def close(self, reason: str) -> LedgerSums:
        """Tell every actor that the run is over and why, stop serving, and return what became of the leases."""
        self._dispatcher.stop(reason)
        self._hub_thread.wake()
        # Messages that an actor has not read when the connection closes are lost; it would wait for a learner that is gone.
        if not self._dispatcher.wait_left(self._leave_timeout_s):
            names = [recipient.name for recipient in self.recipients()]
            logger.warning("actors that did not leave within %g s: %s", self._leave_timeout_s, names)
        return self.pause()

    def pause(self) -> LedgerSums:
        """Stop serving, and return what became of the leases; the actors keep theirs, and look for the next learner."""
        self._hub_thread.close()
        return self._dispatcher.counts()
