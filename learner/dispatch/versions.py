"""The learner's policy versions, held once for everything in this room that reads them."""

from dataclasses import dataclass


@dataclass
class Versions:
    """Policy versions in optimizer steps. The dispatcher changes them; its parts only read them."""

    current: int
    """The version that is trained now."""
    newest: int
    """The newest version that any learner process of this run has made; at least `current`."""
    published: int | None = None
    """The newest version on its way to the actors; None before this process has published one."""

    def __post_init__(self) -> None:
        self.newest = max(self.newest, self.current)

    def advance(self, policy_version: int) -> None:
        """Move to the version that training has reached."""
        self.current = policy_version
        self.newest = max(self.newest, policy_version)
