"""The audit of prompts: each group was accepted for, and trained on, the very prompt that was leased."""

from offbeat.learner.leases.events import Accepted, Granted, LeaseEvent, Trained


class PromptAudit:
    """Reads the events of one run in order and compares the hashes of prompts; older logs hold none."""

    def __init__(self) -> None:
        self.flaws: list[str] = []
        self.num_compared = 0
        """Trained groups whose prompt was compared with the leased one."""
        self.num_trained = 0
        """Trained groups, those trained again after a restart counted again."""
        self._leased: dict[int, int] = {}
        """Hash of the prompt of each lease."""

    def take(self, event: LeaseEvent) -> None:
        """Add the next event."""
        match event:
            case Granted(lease_id=lease_id, prompt_hash=int(leased)):
                self._leased[lease_id] = leased
            case Accepted(lease_id=lease_id, prompt_hash=int(found)):
                self._compare(lease_id, found, "accepted for")
            case Trained():
                self.num_trained += len(event.lease_ids)
                # An older log has none of the hashes.
                for lease_id, found in zip(event.lease_ids, event.prompt_hashes, strict=False):
                    self.num_compared += lease_id in self._leased
                    self._compare(lease_id, found, f"trained at version {event.policy_version} on")

    def _compare(self, lease_id: int, found: int, what: str) -> None:
        leased = self._leased.get(lease_id, found)
        if leased != found:
            self.flaws.append(f"lease {lease_id}: {what} another prompt than was leased (hash {found:016x}, not {leased:016x})")
