"""Warnings about a run's noise: it reaches the objective's bounds, or is not what was calibrated."""

import logging

from offbeat.common.records.rows import EngineRow, EventRow, Recorder, StepRow
from offbeat.common.settings.learning_sections import LossSection
from offbeat.learner.calibration.calibration import (
    Calibration,
    EngineNumerics,
    LearnerNumerics,
    changes,
    engine_numerics,
)
from offbeat.learner.calibration.noise_by_sign import allowed_difference
from offbeat.learner.calibration.noise_warnings import noise_warnings
from offbeat.learner.objectives.objective import resolve_objective
from offbeat.protocols.messages import Hello

logger = logging.getLogger(__name__)


class CalibrationWatch:
    """Warns when noise reaches the objective's bounds, and when learner, engine or clipping differ from `loss.noise_floor`."""

    def __init__(self, calibration: Calibration | None, record: Recorder) -> None:
        self._calibration = calibration
        self._record = record

    def check_learner(self, numerics: LearnerNumerics) -> None:
        """Compare the learner with the one that was calibrated."""
        if self._calibration is not None:
            self._tell(None, self._calibration.learner, numerics)

    def check_bounds(self, loss: LossSection, *, max_new_tokens: int) -> None:
        """Compare clip band, corrections and thresholds with the calibrated noise."""
        if self._calibration is None:
            return
        for warning in noise_warnings(loss, resolve_objective(loss, max_new_tokens=max_new_tokens), self._calibration):
            logger.warning(warning)
            self._record(EventRow(event="noise_reaches_bounds", detail=warning))

    def joined(self, hello: Hello) -> None:
        """Record an actor's engine, and compare it with the one that was calibrated."""
        self._record(EngineRow(actor=hello.actor, engine=hello.engine))
        if self._calibration is not None:
            self._tell(hello.actor, self._calibration.engine, engine_numerics(hello.engine))

    def check_first_step(self, step: StepRow) -> None:
        """Compare the clip fraction of the run's first step, where nothing is stale, with the predicted one."""
        predicted, clipped, count = (step.number(f"by_lag/0/{name}") for name in ("clip_noise", "clip_fraction", "count"))
        calibration = self._calibration
        if calibration is None or predicted is None or clipped is None or not count:
            return
        calibrated = calibration.num_independent
        of_step = count * calibrated / calibration.floor.num_completions
        if abs(clipped - predicted) <= (allowed := allowed_difference(predicted, calibrated=calibrated, measured=of_step)):
            return
        detail = (
            f"loss.noise_floor predicts that noise clips {predicted:.1%} of the first step, where nothing is stale, and "
            f"{clipped:.1%} were clipped; sampling explains a difference of {allowed:.1%}. clip/noise and clip/drift are off "
            "by as much: engine, learner or prompts are not what it was measured on. Run `offbeat calibrate` again."
        )
        logger.warning(detail)
        self._record(EventRow(event="clip_mispredicted", detail=detail, policy_version=step.policy_version))

    def _tell(
        self, actor: str | None, measured: LearnerNumerics | EngineNumerics, now: LearnerNumerics | EngineNumerics
    ) -> None:
        changed = changes(measured, now)
        if not changed:
            return
        detail = f"{actor or 'the learner'} is not what loss.noise_floor was measured on, and its noise may be another: "
        detail += "; ".join(changed) + ". Run `offbeat calibrate` again."
        logger.warning(detail)
        self._record(EventRow(event="calibration_mismatch", detail=detail, actor=actor))
