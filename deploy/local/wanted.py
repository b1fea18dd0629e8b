"""The launcher's questions to the learner: how many actors does the run want? They wait for nothing."""

import logging
import time

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.common.settings.hub_keys import OPERATOR
from offbeat.deploy.operating.link import open_link_to
from offbeat.protocols.channels import Link
from offbeat.protocols.messages import Refused, StatusReport, StatusRequest
from offbeat.protocols.wire import WireError

logger = logging.getLogger(__name__)

ASK_S = 1.0
"""Seconds between two questions."""


class Questions:
    """Asks the learner for its status every `ASK_S`; without an operator's key it asks nothing."""

    def __init__(self, config: Config) -> None:
        self._link = _open_link(config)
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


def _open_link(config: Config) -> Link | None:
    try:
        return open_link_to(config.hub, OPERATOR)()
    except SettingError as error:
        logger.info("scale.actors will not be followed, because the launcher has no operator's key: %s", error)
        return None
