"""The results of each task so far: its groups that were trained on, or dropped because all their rewards are equal."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from offbeat.learner.leases.groups import Group

RECENT_GROUPS = 64
"""Number of the newest groups of a task whose rewards are kept."""


class GroupRewards(NamedTuple):
    """The rewards of a group's completions, as the task gave them."""

    mean: float
    lowest: float
    highest: float


class Tally(msgspec.Struct, forbid_unknown_fields=True):
    """The groups of one task."""

    num_groups: int = 0
    recent: list[GroupRewards] = []
    """The newest `RECENT_GROUPS`, oldest first."""

    def add(self, group: Group) -> None:
        """Add the next group."""
        rewards = [rollout.reward for rollout in group.rollouts]
        self.num_groups += 1
        self.recent.append(GroupRewards(sum(rewards) / len(rewards), min(rewards), max(rewards)))
        del self.recent[:-RECENT_GROUPS]


Tallies = dict[str, Tally]
"""The groups of each task that has any, by the task's name."""


def add_group(tallies: Tallies, group: Group) -> None:
    """Add a group to those of its task, where tasks are told apart."""
    if group.task:
        tallies.setdefault(group.task, Tally()).add(group)


def copy_tallies(tallies: Mapping[str, Tally]) -> Tallies:
    """Return tallies that do not change with these."""
    return {task: Tally(tally.num_groups, [*tally.recent]) for task, tally in tallies.items()}


class TaskResults(NamedTuple):
    """One task as `task.curriculum` sees it."""

    num_prompts: int
    """Prompts of the task in the training data."""
    share: float
    """Share of them that is leased now, 0 to 1."""
    num_groups: int = 0
    """Groups that ended so far: trained on, or dropped because all rewards are equal (`loss.zero_variance`)."""
    recent: tuple[GroupRewards, ...] = ()
    """Rewards of the newest of them, at most `RECENT_GROUPS`, oldest first."""

    @property
    def reward(self) -> float | None:
        """Mean reward of the recent groups; None before the first."""
        return sum(group.mean for group in self.recent) / len(self.recent) if self.recent else None

    @property
    def without_signal(self) -> float | None:
        """Share of the recent groups whose rewards are all equal; None before the first."""
        return sum(group.lowest == group.highest for group in self.recent) / len(self.recent) if self.recent else None


def task_results(
    num_prompts: Mapping[str, int], shares: Mapping[str, float], tallies: Mapping[str, Tally]
) -> dict[str, TaskResults]:
    """Return the results of each task that `num_prompts` names; a task without a share is leased whole."""
    return {
        task: TaskResults(number, shares.get(task, 1.0), tally.num_groups, tuple(tally.recent))
        for task, number in num_prompts.items()
        for tally in (tallies.get(task, Tally()),)
    }
