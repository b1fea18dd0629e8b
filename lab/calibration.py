"""The calibration of a run: noise fitted to completions that a learner scored, clip bands checked against it, and its tables.

scored completions  ->  noise floor, half of the groups against the other half  ->  calibration.json, and a table
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from offbeat.common.errors import SettingError
from offbeat.common.models.folders import hash_model, resolve_model
from offbeat.common.records.rows import EngineRow
from offbeat.common.records.run_folder import CONFIG_FILE, LOG
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.common.settings.completion import engine_band
from offbeat.common.settings.config import Config, environment_of
from offbeat.common.settings.corrections import parse_corrections, write_corrections
from offbeat.common.settings.learning_sections import LossSection
from offbeat.common.settings.loading import load
from offbeat.common.settings.objectives import DEFAULTS, RECOMPUTED, defaults_of, objective_parameters, parse_objective
from offbeat.lab.terminal import FittedTable, stdout_console, table
from offbeat.learner.calibration import bound_noise
from offbeat.learner.calibration.calibration import BandCheck, Calibration, engine_numerics, learner_numerics, save_calibration
from offbeat.learner.calibration.noise_floor import (
    NOISE_CLIP_SHARE,
    ClipBand,
    Differences,
    describe,
    fit,
    noise_by_probability,
    recommend_band,
)
from offbeat.learner.objectives.correction_rules import resolve_corrections
from offbeat.learner.objectives.objective import make_objective
from offbeat.protocols.message_parts import EngineInfo

HALF_WIDTH = 1.96
"""Half-width of a 95% interval, in standard errors."""
WIDE = 0.05
"""Half-width of the interval of a clip fraction above which more groups are advised."""

if TYPE_CHECKING:
    import torch

    from offbeat.learner.leases.groups import Group as PromptGroup


Halves = tuple[Differences, Differences]


class ScoredHalves(NamedTuple):
    """The groups of a run, scored by the learner that is calibrated."""

    halves: Halves
    """The groups in two halves: every other group, and the groups between them."""
    num_groups: int
    device: "torch.device"


def fit_calibration(config: Config, engine: EngineInfo, measured: ScoredHalves) -> Calibration:
    """Fit the noise between `engine` and the learner that `config` makes, and check bands against it."""
    every = Differences.join(measured.halves)
    counted = counted_halves(config.loss, measured.halves)
    of_run, noise = Differences.join(counted), bound_noise.fit_by_sign(every)
    floor = noise.every
    loss = replace(config.loss, anchor="behavior")
    band = make_objective(loss).engine_band
    own = defaults_of(loss.objective).band
    checks: list[BandCheck] = []
    recommended: ClipBand | None = None
    if band is not None and own is not None:
        own_band = band._replace(low=own.low, high=own.high, by_length=None)
        recommended = band._replace(by_length=floor.of_length)
        if band.by_length is None:
            recommended = recommend_band(floor, every.lengths, own_band)
        models = cross_fit(*counted)
        checks = [
            check_band(name, of_name, models)
            for name, of_name in (("own", own_band), ("configured", band), ("above noise", recommended))
        ]
        if config.loss.anchor in RECOMPUTED:
            recommended = own_band
    return Calibration(
        made_at=time.strftime("%Y-%m-%d %H:%M:%S"),
        learner=learner_numerics(config, hash_model(resolve_model(config.model.path)), measured.device),
        engine=engine_numerics(engine),
        num_groups=measured.num_groups,
        objective=parse_objective(config.loss.objective).name,
        anchor=config.loss.anchor,
        floor=floor,
        summaries=describe(every, floor),
        by_probability=noise_by_probability(every),
        checks=checks,
        recommended=recommended,
        positive=noise.positive,
        negative=noise.negative,
        sign_shares=(float(of_run.positive.mean()), float(of_run.negative.mean())),
        bounds=check_bounds(config.loss, measured.halves),
        length_quantiles=tuple(np.quantile(every.lengths, np.linspace(0, 1, 101), method="nearest").tolist()),
    )


def counted_halves(loss: LossSection, halves: Halves) -> Halves:
    """Return the groups that a step counts: without those of equal rewards where `loss.zero_variance` drops them.

    Where fewer than two groups of a half are left, no step could be measured, and all are returned.
    """
    if loss.zero_variance != "drop":
        return halves
    first, second = (half.with_signal() for half in halves)
    return (first, second) if min(len(np.unique(half.groups)) for half in (first, second)) >= 2 else halves


def check_bounds(loss: LossSection, halves: Halves) -> tuple[bound_noise.BoundCheck, ...]:
    """Compare what each half predicts for the other with what is measured: for each correction, and for M2PO's threshold."""
    every, models = Differences.join(halves), cross_fit(*halves)
    floor = fit(every)
    checks: list[bound_noise.BoundCheck] = []
    for choice, rule in zip(parse_corrections(loss.correction), resolve_corrections(loss.correction), strict=True):
        expected = [bound_noise.expected_touched(of_half, rule, other) for of_half, other in models]
        recommended = bound_noise.recommend_bounds(floor, rule, every.lengths)
        checks.append(
            bound_noise.BoundCheck(
                setting="loss.correction",
                value=write_corrections((choice,)),
                predicted=float(np.concatenate(expected).mean()),
                measured=float(bound_noise.measured_touched(every, rule).mean()),
                recommended=None if recommended is None else write_corrections((recommended,)),
            )
        )
    threshold = objective_parameters(loss.objective).get("m2_threshold")
    if threshold is not None and not loss.function:
        needed = bound_noise.recommend_m2_threshold(floor, objective_parameters("m2po")["m2_threshold"])
        checks.append(
            bound_noise.BoundCheck(
                setting="loss.objective",
                value=loss.objective,
                predicted=float(np.mean([bound_noise.expected_dropped(of_half.every, threshold) for of_half, _ in models])),
                measured=bound_noise.measured_dropped(every, threshold),
                recommended=f"m2po({needed:g})",
            )
        )
    return tuple(checks)


def cross_fit(first: Differences, second: Differences) -> tuple[tuple[bound_noise.NoiseBySign, Differences], ...]:
    """Return the noise floors fitted to each half, paired with the other half."""
    return ((bound_noise.fit_by_sign(first), second), (bound_noise.fit_by_sign(second), first))


def check_band(name: str, band: ClipBand, models: Sequence[tuple[bound_noise.NoiseBySign, Differences]]) -> BandCheck:
    """Compare the clipping that each model predicts for the completions beside it with the measured clipping.

    The completions of a group share their prompt and with it much of the noise, so the error of the measurement is taken
    over groups, not over completions.
    """
    every = Differences.join([other for _, other in models])
    expected = [noise.expected_clip(band, other.lengths, other.positive, other.negative) for noise, other in models]
    beyond = [noise.every.beyond(band, other.lengths) for noise, other in models]
    clipped = every.clipped(band)
    measured_below, measured_above = every.beyond(band)
    return BandCheck(
        name=name,
        band=band,
        predicted=float(np.concatenate(expected).mean()),
        measured=float(clipped.mean()),
        measured_error=bound_noise.group_error(clipped, every),
        predicted_below=float(np.concatenate([below for below, _ in beyond]).mean()),
        measured_below=float(measured_below.mean()),
        predicted_above=float(np.concatenate([above for _, above in beyond]).mean()),
        measured_above=float(measured_above.mean()),
    )


def load_groups(source: Path) -> "list[PromptGroup]":
    """Return the groups in a run's log that were sampled under version 0 alone, by rising lease id."""
    from transformers import AutoTokenizer

    from offbeat.learner.leases.log_reading import Position, read_history, read_record
    from offbeat.learner.leases.prompts import load_prompts
    from offbeat.learner.leases.recovery import recover

    config = load(source / CONFIG_FILE)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(config.model.path))
    prompts = load_prompts(
        config.data.train_data, config.data.train_split, config.data, tokenizer, environment=environment_of(config)
    ).prompts
    folder = source / LOG
    records = read_history(folder, Position(0, 0))
    recovered = recover(None, records, lambda position: read_record(folder, position), prompts, config.run.seed)
    return [group for group in recovered.ledger.ready_groups() if group.newest_version == 0]


def engine_of(source: Path) -> EngineInfo:
    """Return the engine that sampled the run. `SettingError` when there was none, or several kinds."""
    engines = [row.engine for row in read_rows_of(source / ROWS_FILE, EngineRow)]
    kinds = {engine_numerics(engine) for engine in engines}
    if len(kinds) != 1:
        found = ", ".join(f"{kind.name} {kind.version} {kind.dtype} {kind.device}" for kind in kinds) or "none"
        raise SettingError(
            "RUN", str(source), f"one engine must have sampled all of it, and it had {found}", "Calibrate without --reuse."
        )
    return engines[0]


def check_source(config: Config, source: Path, engine: EngineInfo) -> None:
    """Raise `SettingError` when the groups were sampled by other weights, or at another temperature, than the learner's."""
    sampled = load(source / CONFIG_FILE)
    cure = "Calibrate without --reuse."
    for setting, theirs, ours in (
        ("model.path", sampled.model.path, config.model.path),
        ("rollout.temperature", sampled.rollout.temperature, config.rollout.temperature),
    ):
        if theirs != ours:
            raise SettingError(setting, ours, f"the run in {source} had {theirs}", cure)
    if engine.hashes != hash_model(resolve_model(config.model.path)):
        raise SettingError("model.path", config.model.path, f"it has changed since the run in {source}", cure)


def print_calibration(calibration: Calibration, folder: Path, *, as_json: bool) -> None:
    """Write the calibration into `folder`, and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = save_calibration(calibration, folder)
    if as_json:
        print(file.read_text())
    else:
        stdout_console().print(render_calibration(calibration))
        # Not by the console, which would break long lines: they are to be pasted.
        print(settings_to_paste(calibration, file))


def render_calibration(calibration: Calibration) -> RenderableType:
    """Return the calibration as text and tables."""
    floor, engine, learner = calibration.floor, calibration.engine, calibration.learner
    head = Text()
    quantized = f" with {engine.quantization}" if engine.quantization else ""
    head.append(f"{engine.name} {engine.version} in {engine.dtype}{quantized} on {engine.device}", style="bold")
    head.append(" against a learner in ")
    head.append(f"{learner.dtype}{' (float32 head)' if learner.fp32_head else ''} on {learner.device}", style="bold")
    head.append(f", same weights: {floor.num_completions:,} completions, {floor.num_tokens:,} tokens, lag 0\n")
    head.append(f"KL(engine || learner) per token: {floor.k1:.2e} (k1), {floor.k3:.2e} (k3)\n")
    head.append(
        f"log s = {floor.mean:.2e} + sqrt({floor.variance:.2e} + {floor.token_variance:.2e} / length) z, of a completion"
    )
    parts: list[RenderableType] = [head, _summary_table(calibration)]
    if calibration.by_probability:
        parts.append(_probability_table(calibration))
    if calibration.checks:
        parts += [_band_table(calibration), *doubts(calibration)]
    if calibration.bounds:
        parts.append(_bounds_table(calibration))
    return Group(*parts, "", _advice(calibration), "")


def settings_to_paste(calibration: Calibration, file: Path) -> str:
    """Return the recommended settings as TOML."""
    band = calibration.recommended
    clips = [] if band is None or band.by_length is not None else [f"clip_low = {band.low:g}", f"clip_high = {band.high:g}"]
    of_setting = {
        setting: [check.recommended or check.value for check in calibration.bounds if check.setting == f"loss.{setting}"]
        for setting in ("correction", "objective")
    }
    corrections = [f'correction = "{" + ".join(of_setting["correction"])}"'] if of_setting["correction"] else []
    objectives = [f'objective = "{value}"' for value in of_setting["objective"]]
    return "\n".join(["[loss]", *objectives, *clips, *corrections, f'noise_floor = "{file}"'])


def _summary_table(calibration: Calibration) -> FittedTable:
    head = ("completions", "number", "d mean", "d std", "log s mean", "log s std", "model's", "log s < 0")
    rows: list[tuple[str, ...]] = []
    for row in calibration.summaries:
        moments = (row.token_mean, row.token_std, row.sequence_mean, row.sequence_std, row.expected_std)
        rows.append((row.name, f"{row.num_completions:,}", *map("{:.1e}".format, moments), f"{row.share_below:.0%}"))
    return table(head, rows, title="Noise: d is log learner - log engine of a token, log s its mean")


def _probability_table(calibration: Calibration) -> FittedTable:
    head = ("p from", "tokens", "d std", "share of d²", "beyond 3 std of all")
    rows: list[tuple[str, ...]] = []
    for row in calibration.by_probability:
        shares = (f"{row.share_of_tokens:.1%}", f"{row.token_std:.1e}", f"{row.share_of_noise:.1%}", f"{row.share_beyond:.2%}")
        rows.append((f"{row.least:g}", *shares))
    return table(head, rows, texts=(), title="Noise by probability p of the token")


def _band_table(calibration: Calibration) -> FittedTable:
    head = ("band", "low, high", "clipped", "measured", "below, above", "measured")
    rows = [
        (
            check.name,
            _show_band(check.band, calibration.lengths),
            f"{check.predicted:.1%}",
            f"{check.measured:.1%} ± {HALF_WIDTH * check.measured_error:.1%}",
            f"{check.predicted_below:.1%}, {check.predicted_above:.1%}",
            f"{check.measured_below:.1%}, {check.measured_above:.1%}",
        )
        for check in calibration.checks
    ]
    title = "Clipped by noise alone: each half of the groups predicts the other; ± at 95%"
    return table(head, rows, title=title)


def _show_band(band: ClipBand, lengths: NDArray[np.int64]) -> str:
    if band.by_length is None:
        return f"{band.low:g}, {band.high:g}"
    bounds = np.stack(band.by_length.bounds(lengths, low=band.low, high=band.high))
    return f"{bounds.min():.2g} to {bounds.max():.2g}"


def doubts(calibration: Calibration) -> list[str]:
    """Return a sentence for each reason not to trust the predicted clip fractions."""
    found: list[str] = []
    floors = (calibration.positive, calibration.negative)
    for name, floor, share in zip(("A > 0", "A < 0"), floors, calibration.sign_shares, strict=True):
        # Where nearly all completions are of one sign, they are all.
        if floor == calibration.floor and share < 1 - NOISE_CLIP_SHARE:
            found.append(
                f"Fewer than {bound_noise.LEAST_GROUPS} groups have completions with {name}: their noise is taken to be that "
                "of all completions. Sample more groups (--groups)."
            )
    for check in calibration.checks:
        if abs(check.predicted - check.measured) > bound_noise.SAMPLING_ERRORS * check.measured_error + bound_noise.MODEL_ERROR:
            found.append(
                f"Do not trust the prediction for the band {check.name}: it misses what was measured by "
                f"{abs(check.predicted - check.measured):.1%}, more than sampling explains."
            )
    half_width = HALF_WIDTH * max(check.measured_error for check in calibration.checks)
    if half_width > WIDE:
        needed = math.ceil(calibration.num_groups * (half_width / WIDE) ** 2)
        found.append(
            f"The clip fraction is only known to ± {half_width:.1%}; --groups {needed} would measure it to ± {WIDE:.0%}."
        )
    return found


def _bounds_table(calibration: Calibration) -> FittedTable:
    head = ("setting", "value", "reaches", "measured", "above noise")
    rows = [
        (check.setting, check.value, f"{check.predicted:.1%}", f"{check.measured:.1%}", check.recommended or "not known")
        for check in calibration.bounds
    ]
    title = "Masked, truncated or dropped by noise alone, and the narrowest bounds above the noise"
    return table(head, rows, texts=("setting", "value", "above noise"), title=title)


def _advice(calibration: Calibration) -> str:
    if DEFAULTS[calibration.objective].bounds_divergence:
        return (
            f'loss.objective = "{calibration.objective}" drops tokens by their probabilities, of which the noise floor '
            "knows only the ratios. clip/fraction of a run's first steps, where nothing lags, shows what noise drops:"
        )
    if calibration.anchor == "group":
        return (
            'With loss.anchor = "group" the ratio is to the mean likelihood of the group, and is not 1 without staleness '
            "either: most of what the band clips is the spread of a group. With the noise floor the run distinguishes drift "
            "from noise:"
        )
    if calibration.recommended is None:
        return (
            f'loss.objective = "{calibration.objective}" clips no gradient: there is no band to set. With the noise floor the '
            "run distinguishes drift from noise in its divergence:"
        )
    if calibration.anchor in RECOMPUTED:
        return (
            f'With loss.anchor = "{calibration.anchor}" the ratio is to log-probs that the learner computes itself: at the '
            "first step of a batch it is 1 whatever the engine's noise, so the objective's own band stays right. The bands "
            'above are for loss.anchor = "behavior".'
        )
    band, usual = calibration.recommended, DEFAULTS[calibration.objective].band
    if DEFAULTS[calibration.objective].is_sequence_ratio:
        usual = engine_band(max_new_tokens=1)
    low, high = (float(np.median(bound)) for bound in band.bounds_of(calibration.lengths))
    advice = (
        f"The narrowest band of which noise alone reaches at most {NOISE_CLIP_SHARE:.0%} on either side. How much wider it has "
        "to be for the staleness you want, see clip/drift of a run:"
    )
    if band.by_length is not None:
        advice = (
            'Each completion has a band of its own (loss.clip_by = "own_length"). With the noise floor it is made of the noise '
            "measured here, as in the row above noise, and the run distinguishes drift from noise:"
        )
    if usual is not None and (low > usual.low or high > usual.high):
        cure = 'loss.anchor="decoupled" and loss.correction="token_tis"'
        if DEFAULTS[calibration.objective].has_behavior_weight:
            cure = 'loss.anchor="proximal"'
        advice = (
            f"The engine's noise is large: it needs a band beyond {usual.low:g}, {usual.high:g}, the widest default, and "
            "inside it the policy may move as far unseen. Better keep the noise out of the ratio, at the cost of one more "
            f"forward pass a batch, with {cure}; or sample without quantization. {advice}"
        )
    return advice
