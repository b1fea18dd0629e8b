"""The metrics rows of optimizer steps: the trainer's numbers beside the loop's times, the buffer and the staleness bound."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EventRow, MetricValue, Recorder, StepRow
from offbeat.common.records.step_metrics import TASK_SHARES
from offbeat.common.settings.config import Config, actors_wanted
from offbeat.learner.calibration.watch import CalibrationWatch
from offbeat.learner.curriculum import Curriculum
from offbeat.learner.diagnostics.sample_rows import SampleRows
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.reports import report
from offbeat.learner.dispatch.status import FleetUse
from offbeat.learner.leases.auto_bound import AutoBound
from offbeat.learner.leases.demand import Demand, DemandDecision, Use
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.log_reading import LogFullError
from offbeat.learner.leases.staleness import StalenessPolicy

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StepRows:
    """Records the steps of each batch and samples of them, then moves what the automatic policies decide on.

    These are `staleness.max_staleness` by `AutoBound`, `scale.actors` by `Demand`, and the shares of tasks by `Curriculum`.
    """

    _dispatcher: Dispatcher
    _auto_bound: AutoBound
    _demand: Demand
    _curriculum: Curriculum
    _samples: SampleRows
    _calibration_watch: CalibrationWatch
    _record: Recorder

    def record(
        self,
        steps: Sequence[Mapping[str, MetricValue]],
        groups: Sequence[Group],
        first_version: int,
        seconds: Mapping[str, float],
        fleet: FleetUse,
    ) -> None:
        """Record the `steps` made of a batch of `groups`, the first of them under weights `first_version`.

        `seconds`, by metric name, are those of the whole batch; each step gets an equal share. `fleet` is of the same time.
        """
        settings = self._dispatcher.settings()
        train, staleness = settings.train, StalenessPolicy(settings.staleness, settings.train)
        scaling = self._weigh_demand(settings, staleness, first_version + len(steps), seconds, fleet)
        ready, in_flight = self._dispatcher.buffer_sizes()
        shares = {f"{TASK_SHARES}{task}": share for task, share in self._curriculum.shares().items()}
        rows: list[StepRow] = []
        for index, step in enumerate(steps):
            start = index % train.steps_per_batch * train.groups_per_step
            of_step = groups[start : start + train.groups_per_step]
            metrics = {
                **step,
                **{name: value / len(steps) for name, value in seconds.items()},
                "staleness/bound": staleness.bounds.max_staleness,
                "staleness/lease_limit": self._dispatcher.lease_limit(),
                "staleness/over_bound": staleness.count_over_bound(of_step, first_version + index),
                "buffer/ready": ready,
                "buffer/in_flight": in_flight,
                "actors/number": fleet.num_actors,
                "actors/spare": fleet.spare,
                "actors/hours": self._demand.actor_hours,
                **shares,
            }
            rows.append(StepRow(policy_version=first_version + index + 1, metrics=metrics))
            self._record(rows[-1])
            self._tell_broken(rows[-1])
            self._samples.record(of_step, rows[-1].policy_version)
        for row in rows:
            self._move_bound(row)
        self._scale(scaling)
        self._curriculum.observe(first_version + len(steps))
        if first_version == 0:
            _log_first_ratio(rows[0])
            self._calibration_watch.check_first_step(rows[0])

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
        if decision is not None:
            self._tune("staleness.max_staleness", decision.max_staleness, decision.reason)

    def _weigh_demand(
        self, settings: Config, policy: StalenessPolicy, policy_version: int, seconds: Mapping[str, float], fleet: FleetUse
    ) -> DemandDecision | None:
        """Return the decision on the number of actors that the batch brings."""
        # At the end leases are few because little is left to train.
        is_ending = policy.left_in_run(policy_version) <= policy.most_open
        use = Use(
            seconds=seconds["time/step_s"],
            waited_s=min(seconds["time/wait_rollouts_s"], seconds["time/step_s"]),
            num_actors=fleet.num_actors,
            num_new=fleet.num_new,
            spare=fleet.spare,
            waits=fleet.waits,
            enough=math.ceil(policy.most_open / fleet.slots) if fleet.slots else settings.scale.max,
            is_troubled=fleet.is_troubled or is_ending,
        )
        return self._demand.observe(use, actors_wanted(settings), settings.scale)

    def _scale(self, decision: DemandDecision | None) -> None:
        if decision is None:
            return
        if decision.actors is None:
            report(self._record, EventRow(event="scale_advice", detail=decision.reason))
        else:
            self._tune("scale.actors", decision.actors, decision.reason)

    def _tune(self, setting: str, value: int, reason: str) -> None:
        try:
            self._dispatcher.tune({setting: str(value)}, "auto", reason)
        except (SettingError, LogFullError) as error:
            # An operator was faster, or the disk is full. Later steps decide again.
            logger.info("%s stays as it is: %s", setting, error)


def _log_first_ratio(first: StepRow) -> None:
    logger.info(
        "Sanity check at the first step (lag up to %d): engine and learner log-probs differ by a mean ratio error of %.1e, "
        "%.1f%% clipped, KL %.2e per token (k3)",
        first.measured("lag/max"),
        first.measured("ratio/first"),
        100 * first.measured("clip/fraction"),
        first.measured("kl/behavior_policy_k3"),
    )
