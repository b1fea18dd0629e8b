"""NCCL without the transports that hang on some machines: peer-to-peer between cards on PCIe, and shared memory in containers.

Both look the same from outside: everybody is ready, and nothing moves. So the next try of the same members avoids both; NCCL
goes through sockets then. Where that works, the run keeps to it, and the operator is told what to set.
"""

import os
from collections.abc import Mapping

from offbeat.common.weights.collectives import CollectiveError, CollectiveLateError
from offbeat.protocols.messages import NcclTransport

TRANSPORTS: tuple[NcclTransport, ...] = ("P2P", "SHM")


class NcclDetour:
    """The transports that the next NCCL group avoids."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Leave alone the transports that the operator's environment decides on."""
        self._suspects: tuple[NcclTransport, ...] = tuple(
            transport for transport in TRANSPORTS if f"NCCL_{transport}_DISABLE" not in environment
        )
        self._is_confirmed = False
        self._reason = ""
        self.avoided: tuple[NcclTransport, ...] = ()

    def note(self, error: CollectiveError) -> None:
        """Note that a group with all of its members failed."""
        text = str(error).lower()
        if isinstance(error, CollectiveLateError) or "/dev/shm" in text or "shared memory" in text:
            self.avoided = self._suspects
            self._reason = str(error)

    def forget(self) -> None:
        """Note that a member explains the failure."""
        if not self._is_confirmed:
            self.avoided = ()

    def confirm(self) -> str | None:
        """Note that a group worked; return what the operator should know when the detour has just proved necessary."""
        if self._is_confirmed or not self.avoided:
            return None
        self._is_confirmed = True
        settings = " and ".join(f"NCCL_{transport}_DISABLE=1" for transport in self.avoided)
        return (
            f"NCCL works here only with {settings}, which this run uses from now on. Set them in the environment of learner "
            f"and actors to begin with them; NVLink or a larger /dev/shm (docker run --shm-size) make transfers faster. "
            f"Without them: {self._reason}"
        )
