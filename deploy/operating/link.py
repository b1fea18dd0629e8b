"""An operator's question to a running learner, over its hub."""

import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from offbeat.common.errors import ServiceError
from offbeat.common.settings.config import HubSection
from offbeat.common.settings.hub_keys import keys_of_peer
from offbeat.protocols.channels import Link
from offbeat.protocols.messages import LiveSettingsReport, LiveSettingsRequest, Refused, StatusReport, StatusRequest
from offbeat.protocols.wire import WireError

ANSWER_S = 5.0
"""Seconds to wait for the answer. The learner's hub has its own thread and answers even during a step."""

OpenLink = Callable[[], Link]
"""A function that opens a link to the hub as an operator."""

Answer = TypeVar("Answer", StatusReport, LiveSettingsReport)


def open_link_to(hub: HubSection, operator: str) -> OpenLink:
    """Return a function that opens links to this hub, with the key of this operator where the run has keys."""
    keys = keys_of_peer(hub, operator, "operator")
    identity = f"operator/{uuid.uuid4().hex}".encode()
    limit = hub.max_message_mb << 20
    return lambda: Link(hub.address, identity=identity, max_message_bytes=limit, key=keys.key, learner_key=keys.learner_key)


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
