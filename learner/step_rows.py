"""The metrics rows of optimizer steps: the trainer's numbers beside the loop's times, the buffer and the staleness bound."""

import logging
from collections.abc import Mapping, Sequence

from offbeat.common.learning_sections import TrainSection
from offbeat.common.rows import EventRow, MetricValue, Recorder, StepRow
from offbeat.common.settings import SettingError
from offbeat.learner.diagnostics.sample_rows import SampleRows
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.leases.auto_bound import AutoBound
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.rollout_log import LogFullError
from offbeat.learner.leases.staleness import StalenessPolicy

logger = logging.getLogger(__name__)


class StepRows:
    """Records the steps of each batch and samples of them, then moves `max_staleness` where the automatic bound decides so."""

    def __init__(
        self, train: TrainSection, dispatcher: Dispatcher, auto_bound: AutoBound, samples: SampleRows, record: Recorder
    ) -> None:
        self._train = train
        self._dispatcher = dispatcher
        self._auto_bound = auto_bound
        self._samples = samples
        self._record = record

    def record(
        self,
        steps: Sequence[Mapping[str, MetricValue]],
        groups: Sequence[Group],
        first_version: int,
        seconds: Mapping[str, float],
    ) -> None:
        """Record the `steps` made of a batch of `groups`, the first of them under weights `first_version`.

        `seconds`, by metric name, are those of the whole batch; each step gets an equal share.
        """
        train = self._train
        staleness = StalenessPolicy(self._dispatcher.settings().staleness, train)
        ready, in_flight = self._dispatcher.buffer_sizes()
        rows: list[StepRow] = []
        for index, step in enumerate(steps):
            start = index % train.steps_per_batch * train.groups_per_step
            of_step = groups[start : start + train.groups_per_step]
            metrics = {
                **step,
                **{name: value / len(steps) for name, value in seconds.items()},
                "staleness/bound": staleness.bounds.max_staleness,
                "staleness/over_bound": staleness.count_over_bound(of_step, first_version + index),
                "buffer/ready": ready,
                "buffer/in_flight": in_flight,
            }
            rows.append(StepRow(policy_version=first_version + index + 1, metrics=metrics))
            self._record(rows[-1])
            self._tell_broken(rows[-1])
            self._samples.record(of_step, rows[-1].policy_version)
        for row in rows:
            self._move_bound(row)
        if first_version == 0:
            _log_first_ratio(rows[0])

    def _tell_broken(self, step: StepRow) -> None:
        leases = step.metrics.get("broken/leases")
        if not isinstance(leases, dict):
            return
        detail = (
            f"optimizer step {step.policy_version} left out {sum(leases.values())} completions of the leases "
            f"{', '.join(leases)}, whose log-probs are broken: {step.metrics['broken/not_finite']} not finite, "
            f"{step.metrics['broken/ratio']} with a token more than e^20 times as likely as when it was sampled. They have no "
            "loss and no gradient, and count in the loss's denominator. Compare engine and learner with `offbeat calibrate`."
        )
        logger.warning(detail)
        self._record(EventRow(event="completions_left_out", detail=detail, policy_version=step.policy_version))

    def _move_bound(self, step: StepRow) -> None:
        decision = self._auto_bound.observe(step, self._dispatcher.settings().staleness)
        if decision is None:
            return
        change = {"staleness.max_staleness": str(decision.max_staleness)}
        try:
            self._dispatcher.tune(change, "auto", decision.reason)
        except (SettingError, LogFullError) as error:
            # An operator was faster, or the disk is full. Later steps decide again.
            logger.info("the automatic bound stays where it is: %s", error)


def _log_first_ratio(first: StepRow) -> None:
    logger.info(
        "FIRST RATIO of the run, where nothing is stale (lag up to %d): mean |s - 1| = %.2e, %.1f%% of completions "
        "clipped, KL of engine and learner %.2e per token (k3)",
        first.measured("lag/max"),
        first.measured("ratio/first"),
        100 * first.measured("clip/fraction"),
        first.measured("kl/behavior_policy_k3"),
    )
