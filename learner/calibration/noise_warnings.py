"""Warnings of a run whose bounds lie inside the calibrated noise: they act before anything is stale."""

import numpy as np

from offbeat.common.settings.corrections import fill_bounds, parse_corrections, write_corrections
from offbeat.common.settings.learning_sections import LossSection
from offbeat.common.settings.objectives import DEFAULTS
from offbeat.learner.calibration.bound_noise import (
    expected_dropped,
    expected_touched,
    recommend_bounds,
    recommend_m2_threshold,
)
from offbeat.learner.calibration.calibration import Calibration
from offbeat.learner.calibration.noise_floor import NOISE_CLIP_SHARE, Differences, recommend_band
from offbeat.learner.objectives.bands import ClipBand
from offbeat.learner.objectives.correction_rules import AnyCorrection, CorrectionRule
from offbeat.learner.objectives.objective import Dppo, M2po, Objective

WARNED_SHARE = 2 * NOISE_CLIP_SHARE
"""Share of tokens reached by noise alone above which a run warns: twice what recommended bounds let through on a side."""


def noise_warnings(loss: LossSection, objective: Objective, calibration: Calibration) -> list[str]:
    """Return a warning for each bound of `objective` that the calibrated noise reaches, with the share and the cure.

    `loss` are the settings that the objective was resolved from. The completions are taken to be as long as the calibrated
    ones, and the signs of their advantages to be as frequent; for corrections half are taken to be below 0.
    """
    lengths = np.tile(calibration.lengths, 2)
    advantages = np.repeat([-1.0, 1.0], lengths.sum() // 2)
    expected = Differences(lengths, np.zeros(len(advantages)), advantages, np.arange(len(lengths)))
    warnings: list[str] = []
    if objective.engine_band is not None:
        warnings += _of_band(loss, objective.engine_band, "clips", calibration)
    if loss.objective == "dppo_tv" and isinstance(objective.token_loss, Dppo) and objective.anchor == "behavior":
        # A probability moves by at most the distance of its ratio from 1: a band of ratios would clip at least as much.
        band = ClipBand(objective.token_loss.threshold_low, objective.token_loss.threshold_high, is_sequence_ratio=False)
        warnings += _of_band(loss, band, "drops up to", calibration)
    for choice, rule in zip(parse_corrections(loss.correction), objective.corrections, strict=True):
        share = float(expected_touched(calibration.noise, rule, expected).mean())
        if share > WARNED_SHARE:
            recommended = recommend_bounds(calibration.floor, rule, lengths)
            cure = "" if recommended is None else f" {write_corrections((recommended,))} would do so on at most 1% a side."
            name = write_corrections((fill_bounds(choice),))
            warnings.append(f"loss.correction: {name} {_does(rule)} {_of_noise(share)}{cure}")
    if isinstance(objective.token_loss, M2po):
        share = expected_dropped(calibration.floor, objective.token_loss.threshold)
        if share > WARNED_SHARE:
            needed = recommend_m2_threshold(calibration.floor, LossSection().m2_threshold)
            setting = f"loss.m2_threshold = {objective.token_loss.threshold:g}"
            warnings.append(f"{setting} drops {_of_noise(share)} {needed:g} would drop none.")
    return warnings


def _of_band(loss: LossSection, band: ClipBand, does: str, calibration: Calibration) -> list[str]:
    floor, lengths = calibration.floor, calibration.lengths
    positive, negative = (np.full(len(lengths), share) for share in calibration.sign_shares)
    share = float(calibration.noise.expected_clip(band, lengths, positive, negative).mean())
    if share <= WARNED_SHARE:
        return []
    own = DEFAULTS[loss.objective].band
    assert own is not None, "an objective that clips has a band of its own"
    needed = recommend_band(floor, lengths, band._replace(low=own.low, high=own.high))
    setting = f"loss.clip_low = {band.low:g}, loss.clip_high = {band.high:g}"
    return [f"{setting} {does} {_of_noise(share)} {needed.low:g}, {needed.high:g} would do so on at most 1% a side."]


def _of_noise(share: float) -> str:
    return f"{share:.0%} of the tokens for the engine's measured noise alone, with nothing stale."


def _does(rule: AnyCorrection) -> str:
    return "truncates" if isinstance(rule, CorrectionRule) and rule.truncates else "masks"
