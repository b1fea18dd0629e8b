"""Warnings that a run's noise may differ from the calibrated one, because its learner or an engine differs."""

import logging

from offbeat.common.rows import EngineRow, EventRow, Recorder
from offbeat.learner.diagnostics.calibration import (
    Calibration,
    EngineNumerics,
    LearnerNumerics,
    changes,
    engine_numerics,
)
from offbeat.protocols.messages import Hello

logger = logging.getLogger(__name__)


class CalibrationWatch:
    """Warns when the learner or an engine differs from the one that `loss.noise_floor` was measured on."""

    def __init__(self, calibration: Calibration | None, record: Recorder) -> None:
        self._calibration = calibration
        self._record = record

    def check_learner(self, numerics: LearnerNumerics) -> None:
        """Compare the learner with the one that was calibrated."""
        if self._calibration is not None:
            self._tell(None, self._calibration.learner, numerics)

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
