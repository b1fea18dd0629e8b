"""A stand-in for the learner's hub, for tests of operators' commands."""

import threading
from pathlib import Path

from offbeat.common.settings.hub_keys import keys_of_learner, keys_of_peer
from offbeat.common.settings.loading import load
from offbeat.deploy.local.keygen import make_keys
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import ActorMessage, LiveSettingsReport, MemberStatus, Refused, StatusReport
from tests.deploy.services import free_port

REPORT = StatusReport(
    run_id="abc",
    policy_version=7,
    num_steps=100,
    published_version=6,
    doing="training step 8",
    doing_s=2.5,
    waiting_for="3 groups ready, 5 being generated",
    uptime_s=3723.0,
    members=(
        MemberStatus("good", "working", 6, 3, 4, 1234.0, 0.2, "vllm 1"),
        MemberStatus("bad", "quarantined", -1, 0, 4, 0.0, 9.0, "vllm 1"),
    ),
    ledger={"leased": 12, "trained": 4, "dropped/stale": 1, "expired": 0, "in flight": 7},
    num_ready=3,
    num_generating=5,
    epoch=1,
    epoch_position=0.25,
    log_bytes=3 << 20,
    problems=("the disk is full",),
    rejected={"bad: a lease that is not its own": 3},
    actors_wanted=2,
)


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
        return Link(self.address, identity=b"ops", max_message_bytes=1 << 20, keys=keys)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _serve(self) -> None:
        keys = keys_of_learner(self.hub_section)
        with Hub(self.address, max_message_bytes=1 << 20, keys=keys) as hub:
            while not self._is_closed.is_set():
                hub.wait(0.05)
                received = hub.receive()
                if received is not None:
                    assert isinstance(received.packet, tuple)
                    assert received.sender.role == "operator"
                    self.asked.append(received.packet.message)
                    hub.send(received.peer, self._answer)
