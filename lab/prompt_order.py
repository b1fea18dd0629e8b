"""The audit of prompts: their order, worked out again from the seed and the shares of tasks, and each group's own prompt."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from offbeat.learner.leases.events import Accepted, Granted, LeaseEvent, Trained, Weighed
from offbeat.learner.leases.prompt_stream import PromptTurn, draws


class PromptAudit:
    """Reads the events of one run in order and compares the hashes of prompts."""

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
            case Granted(lease_id=lease_id, prompt_hash=leased):
                self._leased[lease_id] = leased
            case Accepted(lease_id=lease_id, prompt_hash=found):
                self._compare(lease_id, found, "accepted for")
            case Trained():
                self.num_trained += len(event.lease_ids)
                for lease_id, found in zip(event.lease_ids, event.prompt_hashes, strict=True):
                    self.num_compared += lease_id in self._leased
                    self._compare(lease_id, found, f"trained at version {event.policy_version} on")

    def _compare(self, lease_id: int, found: int, what: str) -> None:
        leased = self._leased.get(lease_id, found)
        if leased != found:
            self.flaws.append(f"lease {lease_id}: {what} another prompt than was leased (hash {found:016x}, not {leased:016x})")


class PromptOrder:
    """Reads the events of one run in order, and compares the first leases of turns with the order they should have."""

    def __init__(self) -> None:
        self._turns: dict[PromptTurn, Mapping[str, float]] = {}
        """The shares in force at the first lease of each turn, in the order of these leases."""
        self._shares: Mapping[str, float] = {}
        self._tasks: dict[int, str] = {}
        """The task of each prompt that was leased, where tasks are told apart."""

    def take(self, event: LeaseEvent) -> None:
        """Add the next event."""
        match event:
            case Weighed():
                self._shares = event.shares
            case Granted():
                self._turns.setdefault(PromptTurn(event.prompt_id, event.epoch), self._shares)
                if event.task:
                    self._tasks[event.prompt_id] = event.task

    def compare(self, seed: int, sizes: Sequence[int], lost: Collection[PromptTurn]) -> tuple[list[str], Counter[int]]:
        """Return violations of the order of epochs of these sizes, and by epoch the turns that the shares of tasks left out.

        The leases of `lost` turns were destroyed on purpose.
        """
        num_left_out: Counter[int] = Counter()
        due = _order(seed, sizes)
        for turn, shares in self._turns.items():
            for expected, draw in due:
                if expected == turn:
                    if draw >= shares.get(self._tasks.get(turn.prompt_id, ""), 1.0):
                        text = f"prompt {turn.prompt_id} of epoch {turn.epoch} was leased, but its task's share leaves it out"
                        return [text], num_left_out
                    break
                if expected in lost:
                    continue
                if not self._may_leave_out(expected, draw, shares):
                    return [_out_of_turn(turn, expected)], num_left_out
                num_left_out[expected.epoch] += 1
            else:
                return [_out_of_turn(turn, PromptTurn(-1, len(sizes)))], num_left_out
        return [], num_left_out

    def _may_leave_out(self, turn: PromptTurn, draw: float, shares: Mapping[str, float]) -> bool:
        """Return whether the shares leave a turn out. A prompt that was never leased may be of any task."""
        task = self._tasks.get(turn.prompt_id)
        share = min(shares.values(), default=1.0) if task is None else shares.get(task, 1.0)
        return draw >= share


def _out_of_turn(turn: PromptTurn, due: PromptTurn) -> str:
    return (
        f"prompt {turn.prompt_id} of epoch {turn.epoch} was leased when it was the turn of prompt {due.prompt_id} of "
        f"epoch {due.epoch}"
    )


def _order(seed: int, sizes: Sequence[int]) -> Iterable[tuple[PromptTurn, float]]:
    """Yield each turn with the number that is compared with its task's share."""
    for epoch, size in enumerate(sizes):
        chosen = draws(seed, epoch, size)
        for prompt_id in np.random.default_rng([seed, epoch]).permutation(size).tolist():
            yield PromptTurn(prompt_id, epoch), float(chosen[prompt_id])
