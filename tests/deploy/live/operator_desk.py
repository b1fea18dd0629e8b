"""A stand-in for the learner's hub, for tests of operators' commands."""

import threading
from pathlib import Path

from offbeat.common.hub_keys import keys_of_learner, keys_of_peer
from offbeat.common.settings import load
from offbeat.deploy.launch.keygen import make_keys
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import ActorMessage, LiveSettingsReport, Refused, StatusReport
from tests.deploy.services import free_port


class Desk:
    """A hub that answers every question with the same message, and records sender and question."""

    def __init__(self, folder: Path, answer: StatusReport | LiveSettingsReport | Refused) -> None:
        make_keys(folder, [], [])
        port = free_port()
        self.address = f"tcp://127.0.0.1:{port}"
        keys = [
            f'hub.key="{folder}/{{name}}.key"',
            f'hub.learner_key="{folder}/learner.pub"',
            f'hub.allowed_keys="{folder}/allowed_keys"',
        ]
        self.hub_section = load(None, keys).hub
        self.asked: list[ActorMessage] = []
        self._answer = answer
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def open_link(self) -> Link:
        keys = keys_of_peer(self.hub_section, "operator", "operator")
        return Link(self.address, identity=b"ops", max_message_bytes=1 << 20, key=keys.key, learner_key=keys.learner_key)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _serve(self) -> None:
        keys = keys_of_learner(self.hub_section)
        with Hub(self.address, max_message_bytes=1 << 20, key=keys.key, allowed=keys.allowed) as hub:
            while not self._is_closed.is_set():
                hub.wait(0.05)
                received = hub.receive()
                if received is not None:
                    assert isinstance(received.packet, tuple)
                    assert received.sender.role == "operator"
                    self.asked.append(received.packet.message)
                    hub.send(received.peer, self._answer)
