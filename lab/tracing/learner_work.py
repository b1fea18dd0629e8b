"""The learner's work as spans: waits, training and weight updates; and the actors' pulls and commits of weights."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from offbeat.common.records.rows import CommitRow, OtherRow, PullRow, Row, StepRow, WeightsRow
from offbeat.lab.tracing.spans import Process, Span
from offbeat.learner.leases.events import Trained

_METRICS = ("reward/mean", "lag/mean", "time/train_s", "time/wait_rollouts_s")


class Work:
    """The learner's time and weight updates, read from the rows."""

    def __init__(self, rows: Iterable[Row | OtherRow]) -> None:
        self._steps: dict[int, StepRow] = {}
        self._updates: list[Span] = []
        self._of_actors: defaultdict[str, list[Span]] = defaultdict(list)
        for row in rows:
            match row:
                case StepRow():
                    self._steps[row.policy_version] = row
                case WeightsRow():
                    told = {"actors": row.num_members, "excluded": row.num_excluded}
                    self._updates.append(_ended(f"publish weights {row.policy_version}", row.time, row.publish_s, **told))
                case PullRow():
                    name = f"pull weights {row.policy_version}"
                    self._of_actors[row.actor].append(_ended(name, row.time, row.pull_s, bytes=row.sent_bytes))
                case CommitRow():
                    name = f"commit weights {row.policy_version}"
                    self._of_actors[row.actor].append(_ended(name, row.time, row.stall_s))
                case _:
                    pass

    def processes(self, batches: Sequence[Trained]) -> list[Process]:
        """Return the learner's tracks and those of the actors' weights."""
        of_actors = [Process(f"{name}: weights", tuple(spans)) for name, spans in sorted(self._of_actors.items())]
        updates = [Process("learner: weights", tuple(self._updates))] if self._updates else []
        return [Process("learner", tuple(self._batches(batches))), *updates, *of_actors]

    def _batches(self, batches: Sequence[Trained]) -> Iterable[Span]:
        """Yield the wait for each batch and the training on it, in order."""
        reached = float("-inf")
        for batch in batches:
            versions = range(batch.policy_version + 1, batch.policy_version + batch.num_steps + 1)
            steps = [self._steps[version] for version in versions if version in self._steps]
            selected = max(reached, batch.selected_at)
            waited_s = sum(step.number("time/wait_rollouts_s") or 0.0 for step in steps)
            if waited_s:
                yield Span("wait for rollouts", max(reached, selected - waited_s), selected)
            reached = max(selected, batch.at)
            last = batch.policy_version + batch.num_steps
            name = f"step {last}" if batch.num_steps == 1 else f"steps {batch.policy_version + 1} to {last}"
            numbers = {metric: value for metric in _METRICS if steps and (value := steps[-1].number(metric)) is not None}
            yield Span(name, selected, reached, {"groups": len(batch.lease_ids), **numbers})


def _ended(name: str, end: float, seconds: float, **attributes: int) -> Span:
    return Span(name, end - max(0.0, seconds), end, attributes)
