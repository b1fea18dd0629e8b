"""Warnings about a run's noise: it reaches the objective's bounds, or may not be what was calibrated."""

import logging

from offbeat.common.learning_sections import LossSection
from offbeat.common.rows import EngineRow, EventRow, Recorder
from offbeat.learner.diagnostics.calibration import (
    Calibration,
    EngineNumerics,
    LearnerNumerics,
    changes,
    engine_numerics,
)
from offbeat.learner.diagnostics.noise_warnings import noise_warnings
from offbeat.learner.objectives.objective import resolve_objective
from offbeat.protocols.messages import Hello

logger = logging.getLogger(__name__)


class CalibrationWatch:
    """Warns when noise reaches the objective's bounds, and when learner or engine differ from those of `loss.noise_floor`."""

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
