"""Warnings about a run's noise: it reaches the objective's bounds, or is not what was calibrated."""

import logging

import numpy as np
import torch

from offbeat.common.records.rows import EngineRow, EventRow, Recorder, StepRow
from offbeat.common.settings.config import Config
from offbeat.common.settings.corrections import parse_corrections, write_corrections
from offbeat.common.settings.learning_sections import LossSection
from offbeat.common.settings.objectives import defaults_of, objective_parameters, parse_objective
from offbeat.learner.calibration import bound_noise
from offbeat.learner.calibration.calibration import (
    Calibration,
    EngineNumerics,
    LearnerNumerics,
    changes,
    engine_numerics,
    learner_numerics,
)
from offbeat.learner.calibration.noise_floor import NOISE_CLIP_SHARE, Differences, recommend_band
from offbeat.learner.objectives.bands import ClipBand
from offbeat.learner.objectives.correction_rules import CorrectionRule
from offbeat.learner.objectives.objective import Objective, make_objective
from offbeat.protocols.message_parts import ModelHashes
from offbeat.protocols.messages import Hello

logger = logging.getLogger(__name__)

WARNED_SHARE = 2 * NOISE_CLIP_SHARE
"""Share of tokens reached by noise alone above which a run warns: twice what recommended bounds let through on a side."""


def noise_warnings(loss: LossSection, objective: Objective, calibration: Calibration) -> list[str]:
    """Return a warning for each bound of `objective` that the calibrated noise reaches, with the share and the cure.

    `loss` are the settings that the objective was made from. The completions are taken to be as long as the calibrated
    ones, and the signs of their advantages to be as frequent; for corrections half are taken to be below 0.
    """
    lengths = np.tile(calibration.lengths, 2)
    advantages = np.repeat([-1.0, 1.0], lengths.sum() // 2)
    expected = Differences(lengths, np.zeros(len(advantages)), advantages, np.arange(len(lengths)))
    warnings: list[str] = []
    # A band by the completion's own length is made of this noise.
    if objective.engine_band is not None and objective.engine_band.by_length is None:
        warnings += _of_band(loss, objective.engine_band, "clips", calibration)
    if parse_objective(loss.objective).name == "dppo_tv" and objective.bounds is not None and objective.anchor == "behavior":
        # A probability moves by at most the distance of its ratio from 1: a band of ratios would clip at least as much.
        warnings += _of_band(loss, objective.bounds, "drops up to", calibration)
    for choice, rule in zip(parse_corrections(loss.correction), objective.corrections, strict=True):
        share = float(bound_noise.expected_touched(calibration.noise, rule, expected).mean())
        if share > WARNED_SHARE:
            recommended = bound_noise.recommend_bounds(calibration.floor, rule, lengths)
            cure = "" if recommended is None else f" {write_corrections((recommended,))} would do so on at most 1% a side."
            name = write_corrections((choice,))
            does = "truncates" if isinstance(rule, CorrectionRule) and rule.truncates else "masks"
            warnings.append(f"loss.correction: {name} {does} {_of_noise(share)}{cure}")
    if objective.m2_threshold is not None:
        share = bound_noise.expected_dropped(calibration.floor, objective.m2_threshold)
        if share > WARNED_SHARE:
            needed = bound_noise.recommend_m2_threshold(calibration.floor, objective_parameters("m2po")["m2_threshold"])
            warnings.append(f"loss.objective: {loss.objective} drops {_of_noise(share)} m2po({needed:g}) would drop none.")
    return warnings


def _of_band(loss: LossSection, band: ClipBand, does: str, calibration: Calibration) -> list[str]:
    floor, lengths = calibration.floor, calibration.lengths
    positive, negative = (np.full(len(lengths), share) for share in calibration.sign_shares)
    share = float(calibration.noise.expected_clip(band, lengths, positive, negative).mean())
    if share <= WARNED_SHARE:
        return []
    own = defaults_of(loss.objective).band
    assert own is not None, "an objective that clips has a band of its own"
    needed = recommend_band(floor, lengths, band._replace(low=own.low, high=own.high))
    setting = f"loss.clip_low = {band.low:g}, loss.clip_high = {band.high:g}"
    return [f"{setting} {does} {_of_noise(share)} {needed.low:g}, {needed.high:g} would do so on at most 1% a side."]


def _of_noise(share: float) -> str:
    return f"{share:.0%} of the tokens for the engine's measured noise alone, with nothing stale."


class CalibrationWatch:
    """Warns when noise reaches the objective's bounds, and when learner, engine or clipping differ from `loss.noise_floor`."""

    def __init__(self, calibration: Calibration | None, record: Recorder) -> None:
        self._calibration = calibration
        self._record = record

    def check_learner(self, numerics: LearnerNumerics) -> None:
        """Compare the learner with the one that was calibrated."""
        if self._calibration is not None:
            self._tell(None, self._calibration.learner, numerics)

    def check_bounds(self, loss: LossSection) -> None:
        """Compare clip band, corrections and thresholds with the calibrated noise."""
        if self._calibration is None:
            return
        for warning in noise_warnings(loss, make_objective(loss, self._calibration.floor.of_length), self._calibration):
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
        allowed = bound_noise.allowed_difference(predicted, calibrated=calibrated, measured=of_step)
        if abs(clipped - predicted) <= allowed:
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


def watch_calibration(
    config: Config, calibration: Calibration | None, hashes: ModelHashes, device: torch.device, record: Recorder
) -> CalibrationWatch:
    """Warn of a learner and of bounds that do not suit the calibration; return the watch over actors and first steps.

    `hashes` are the learner's model's, `device` is where it trains.
    """
    watch = CalibrationWatch(calibration, record)
    watch.check_learner(learner_numerics(config, hashes, device))
    watch.check_bounds(config.loss)
    return watch
