"""An operator's questions to a running learner, over its hub: one that waits for its answer, and a launcher's regular one."""

import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.records.run_folder import read_run_id
from offbeat.common.settings.config import Config, HubSection
from offbeat.common.settings.hub_keys import OPERATOR, keys_of_peer
from offbeat.protocols.channels import Link
from offbeat.protocols.messages import LiveSettingsReport, LiveSettingsRequest, Refused, StatusReport, StatusRequest
from offbeat.protocols.wire import WireError

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Seconds to wait for the answer. The learner's hub has its own thread and answers even during a step."""
ASK_S = 1.0
"""Seconds between two questions of a launcher."""
OpenLink = Callable[[], Link]
"""A function that opens a link to the hub as an operator."""
Answer = TypeVar("Answer", StatusReport, LiveSettingsReport)


def open_link_to(hub: HubSection, operator: str) -> OpenLink:
    """Return a function that opens links to this hub, with the key of this operator where the run has keys."""
    keys = keys_of_peer(hub, operator, "operator")
    identity = f"operator/{uuid.uuid4().hex}".encode()
    limit = hub.max_message_mb << 20
    return lambda: Link(hub.address, identity=identity, max_message_bytes=limit, keys=keys)


def ask(link: Link, address: str, question: StatusRequest | LiveSettingsRequest, kind: type[Answer]) -> Answer:
    """Send one question and return its answer; raise `ServiceError` when there is none or the learner refuses.

    Waits for: the connection, then the learner's answer, `ANSWER_S` in all.
    """
    link.follow()
    deadline = time.monotonic() + ANSWER_S
    is_asked = False
    while (left_s := deadline - time.monotonic()) > 0:
        is_asked = is_asked or link.send(question)
        try:
            received = link.receive(min(left_s, 0.05 if not is_asked else left_s))
        except WireError as error:
            raise ServiceError(f"the learner at {address}: {error}") from error
        answer = received.message if received is not None else None
        if isinstance(answer, Refused):
            raise ServiceError(f"the learner at {address} refused to answer: {answer.reason}")
        if isinstance(answer, kind):
            return answer
    why = "the learner is stopped, or overloaded" if is_asked else link.refusal() or "nothing listens there"
    raise ServiceError(f"no answer from {address} within {ANSWER_S:g} s: {why}")


def ask_status(open_link: OpenLink, address: str, folder: Path) -> StatusReport:
    """Return the learner's status over a link of its own; raise as `ask_status_over`."""
    with open_link() as link:
        return ask_status_over(link, address, folder)


def ask_status_over(link: Link, address: str, folder: Path) -> StatusReport:
    """Return the status of the run in `folder`; raise as `ask`, and `ServiceError` when the learner of another run answers.

    Runs share the default address, so the next run answers there once the learner of this one was killed. A folder that is not
    on this machine tells nothing of its run: then any learner will do.
    """
    report = ask(link, address, StatusRequest(), StatusReport)
    run_id = read_run_id(folder)
    if run_id not in ("", report.run_id):
        raise ServiceError(
            f"at {address} the learner of another run answers: {report.run_id}. The run in {folder} is {run_id}, and its "
            "learner is not there"
        )
    return report


class StatusPoll:
    """Asks the learner for its status every `ASK_S`; without an operator's key it asks nothing."""

    def __init__(self, config: Config) -> None:
        self._link: Link | None = None
        try:
            self._link = open_link_to(config.hub, OPERATOR)()
        except SettingError as error:
            logger.info("scale.actors will not be followed, because the launcher has no operator's key: %s", error)
        self._asked_at = -ASK_S
        self._problem = ""

    def answer(self) -> StatusReport | None:
        """Return the learner's status if it has come since the last call, and ask again when it is time."""
        if self._link is None:
            return None
        now = time.monotonic()
        if now - self._asked_at >= ASK_S and self._link.send(StatusRequest()):
            self._asked_at = now
        try:
            received = self._link.receive()
        except WireError as error:
            self._tell(str(error))
            return None
        message = received.message if received is not None else None
        if isinstance(message, Refused):
            self._tell(message.reason)
        return message if isinstance(message, StatusReport) else None

    def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.close()

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            logger.warning("scale.actors is not followed, because the learner does not answer: %s", problem)
        self._problem = problem
