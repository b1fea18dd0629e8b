"""`offbeat replay`: a recorded run under other bounds, orders and objectives, in tables that name their limits."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from offbeat.common.errors import SettingError
from offbeat.common.formats import number
from offbeat.common.records.run_folder import CHECKPOINTS, LOG, read_run_config
from offbeat.common.settings.checks import check
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import replace_settings
from offbeat.common.settings.objectives import RECOMPUTED
from offbeat.lab.audit import is_log_whole
from offbeat.lab.counterfactual import LeaseEnds, Recording, differences, read_recording, recorded_ends, replay
from offbeat.lab.terminal import FittedTable, table
from offbeat.learner.leases.events import Accepted, Tuned
from offbeat.learner.leases.log_reading import read_whole_log
from offbeat.learner.training import checkpoints

if TYPE_CHECKING:
    from offbeat.lab.gradients import GradientRow

RECORDED = "recorded"
"""Label of the replay with the recorded settings."""
MAX_SHOWN_LAG = 9
"""Larger lags share a column of the printed histogram."""

CANNOT_TELL = (
    "The reward that another bound, order or objective would have reached: all rollouts are those of the recorded weights. "
    "`offbeat sweep` trains, and compares.",
    "What was never generated: a bound wider than the recorded one shows no more rollouts than were recorded, and a prompt "
    "that only the replay drops is not leased again.",
    "How groups would have arrived: they come when they did, from the weights they had, though another bound might have kept "
    'their actor waiting for newer ones. "older" counts the leases of which that is known; the more there are, the less the '
    "replayed lags and drops are that bound's. `offbeat simulate` predicts arrivals.",
)
CANNOT_TELL_OF_GRADIENTS = (
    "What an objective would have made of its own weights: the checkpoints are those that the recorded objective trained. "
    '"seen" counts the groups that a checkpoint has been trained on, for want of others as old.',
)


class BoundRow(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded leases under one bound."""

    max_staleness: int
    policy: str
    num_recorded: int
    """Leases in the log."""
    num_admitted: int
    num_older: int
    """Admitted leases that began under weights older than the bound allows."""
    num_trained: int
    dropped: dict[str, int]
    """Leases by reason."""
    num_expired: int
    num_left: int
    """Leases open in the end."""
    num_batches: int
    duration_s: float
    """Seconds from the first record to the end of the last batch."""
    lag_mean: float | None
    """Mean lag of the groups trained, in optimizer steps; this and the next three are None when none was trained."""
    lag_max: int | None
    over_bound: float | None
    """Share of the groups trained whose lag exceeded `max_staleness`."""
    length_trained: float | None
    """Mean tokens of the completions trained on."""
    length_generated: float | None
    """Mean tokens of all completions that arrived; None when none did."""
    lags: dict[str, int]
    """Groups trained, by policy lag."""

    @property
    def label(self) -> str:
        """The bound in two words."""
        return f"{self.max_staleness} {self.policy}"


@dataclass(frozen=True)
class Report:
    """The result of `offbeat replay`."""

    recorded: BoundRow
    """A replay with the recorded settings."""
    differences: list[str]
    """Differences between that and the log. Empty when every admission, drop, batch and lag is as recorded; otherwise nothing
    here can be trusted."""
    bounds: list[BoundRow]
    gradients: "list[GradientRow]"
    notes: list[str]
    cannot_tell: list[str]


def replay_run(
    run: Path, *, staleness: Sequence[int] = (), policies: Sequence[str] = (), objectives: Sequence[str] = ()
) -> Report:
    """Replay the run in this folder with other bounds, and compare the gradients of these objectives.

    Without values of one of staleness and policy, the recorded one stays. Raises `SettingError` when the log is missing or
    cut, and for values that the run cannot have.
    """
    config = read_run_config(run)
    variants = list(_variants(config, staleness, policies))
    if objectives:
        _check_objectives(config, objectives)
    recording = read_recording(read_whole_log(_log_folder(run, config)))
    recorded = recorded_ends(recording, config)
    exact = replay(recording, config)
    outcomes = [replay(recording, config, changed) for changed in variants]
    lengths = _lengths(recording)
    rows = [
        bound_row(replace_settings(config, changed), ends, lengths) for changed, ends in zip(variants, outcomes, strict=True)
    ]
    notes = _changes(recording)
    gradients: list[GradientRow] = []
    if objectives:
        lags = {RECORDED: exact.lags}
        lags |= {row.label: ends.lags for row, ends in zip(rows, outcomes, strict=True)}
        gradients, more_notes = _gradients(run, config, objectives, recorded, lags)
        notes += more_notes
    return Report(
        recorded=bound_row(config, exact, lengths),
        differences=differences(recorded, exact),
        bounds=rows,
        gradients=gradients,
        notes=notes,
        cannot_tell=[*CANNOT_TELL, *(CANNOT_TELL_OF_GRADIENTS if objectives else ())],
    )


def render_replay(report: Report) -> RenderableType:
    """Return the report as text and tables."""
    parts: list[RenderableType] = [_verdict(report), _bound_table(report), _lag_table(report)]
    if report.gradients:
        parts.append(_gradient_table(report.gradients))
    parts += [Text(f"! {note}", style="yellow") for note in report.notes]
    parts.append(Text("What this cannot tell:", style="bold"))
    parts += [Text(f"- {text}") for text in report.cannot_tell]
    return Group(*parts)


def bound_row(config: Config, ends: LeaseEnds, lengths: Mapping[int, Sequence[int]]) -> BoundRow:
    """Return the ends of a run's leases in numbers; `lengths` are those of each lease's completions, in tokens."""
    bounds = config.staleness
    trained = [group for batch in ends.batches for group in batch.groups]
    lags = ends.lags
    return BoundRow(
        max_staleness=bounds.max_staleness,
        policy=bounds.staleness_policy,
        num_recorded=ends.num_recorded,
        num_admitted=len(ends.admitted),
        num_older=ends.num_older,
        num_trained=len(trained),
        dropped=dict(Counter(reason for _, reason in ends.dropped)),
        num_expired=len(ends.expired),
        num_left=ends.num_left,
        num_batches=len(ends.batches),
        duration_s=ends.duration_s,
        lag_mean=statistics.fmean(lags) if lags else None,
        lag_max=max(lags, default=None),
        over_bound=statistics.fmean(group.is_over_bound for group in trained) if trained else None,
        length_trained=_mean_length(lengths, [group.lease_id for group in trained]),
        length_generated=_mean_length(lengths, ends.arrived),
        lags={str(lag): count for lag, count in sorted(Counter(lags).items())},
    )


# What is read


def _log_folder(run: Path, config: Config) -> Path:
    """Return the run's log, which must reach back to its first record: every decision depends on all before it."""
    folder = run / LOG
    if not folder.is_dir():
        raise SettingError("RUN", str(run), "it has no rollout log", "Replay a run that was made with log.enabled=true.")
    if not is_log_whole(folder):
        raise SettingError(
            "RUN",
            str(run),
            f"the beginning of its rollout log was deleted, which was kept to log.retain_mb = {config.log.retain_mb}",
            "Replay a run whose log.retain_mb is more than its whole log takes.",
        )
    return folder


def _variants(config: Config, staleness: Sequence[int], policies: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the settings that each replay changes."""
    if not (staleness or policies):
        return
    bounds = config.staleness
    for max_staleness in staleness or (bounds.max_staleness,):
        for policy in policies or (bounds.staleness_policy,):
            changed = {"staleness.max_staleness": str(max_staleness), "staleness.staleness_policy": policy}
            if policy != "gate" and bounds.hard_max_staleness is not None:
                # Settings of the policy gate alone. A replay moves no bound by itself.
                changed |= {"staleness.hard_max_staleness": "none", "staleness.auto": "false"}
            check(replace_settings(config, changed))
            yield changed


def _check_objectives(config: Config, objectives: Sequence[str]) -> None:
    """Raise `SettingError` for objectives that cannot be compared, before a log of gigabytes is read."""
    from offbeat.common.processes.environment import prepare_environment

    prepare_environment()
    from offbeat.lab.gradients import objective_config

    for objective in objectives:
        objective_config(config, objective)
    if config.launch.learner_processes > 1:
        raise SettingError(
            "--loss",
            ",".join(objectives),
            f"the run's checkpoints are of launch.learner_processes = {config.launch.learner_processes}, and gradients are "
            "computed in one process",
            "Leave --loss out.",
        )


def _gradients(
    run: Path, config: Config, objectives: Sequence[str], recorded: LeaseEnds, lags: Mapping[str, Sequence[int]]
) -> "tuple[list[GradientRow], list[str]]":
    """Return the gradients' rows, and notes on them."""
    damage = {folder: checkpoints.find_damage(folder) for folder in checkpoints.whole(run / CHECKPOINTS)}
    folders = [folder for folder, flaw in damage.items() if flaw is None]
    if not damage:
        return [], [
            f"No gradients: the run kept no checkpoint (train.checkpoint_interval = {config.train.checkpoint_interval}). Set "
            "train.checkpoint_interval to the optimizer steps between two, and train.keep_checkpoints to how many are kept."
        ]
    from offbeat.lab.gradients import compare, load_candidates
    from offbeat.learner.policy.zero import MAX_FULL_GRADIENTS, deepspeed_config

    trained_at = {group.lease_id: batch.policy_version for batch in recorded.batches for group in batch.groups}
    candidates = load_candidates(read_whole_log(run / LOG), config, trained_at)
    rows = list(compare(config, objectives, folders, candidates, lags))
    notes = [f"Damaged and not read: {folder.name}, where {flaw}." for folder, flaw in sorted(damage.items()) if flaw]
    compared = {checkpoints.checkpoint_folder(run, row.policy_version).name for row in rows}
    passed_over = [folder.name for folder in sorted(folders) if folder.name not in compared]
    if passed_over:
        notes.append(
            f"Passed over, for too few groups that are no newer and that they were not trained on: {', '.join(passed_over)}."
        )
    if deepspeed_config(config.train, config.model.dtype)["zero_optimization"]["stage"] > 0:
        notes.append(
            f"Under ZeRO, as in every bfloat16 run, norms and cosines are of at most {MAX_FULL_GRADIENTS} matrices, spread "
            "evenly over the model."
        )
    if config.loss.anchor in RECOMPUTED:
        notes.append(
            f'loss.anchor = "{config.loss.anchor}": these are first steps on a batch, where the ratio to recomputed log-probs '
            "is 1 and nothing is clipped; staleness shows in the correction alone."
        )
    return rows, notes


def _changes(recording: Recording) -> list[str]:
    """Return a note on the bounds that were changed while the run went on, if any was."""
    changes = [
        f"{setting} = {text} at version {event.policy_version}"
        for event in recording.events
        if isinstance(event, Tuned)
        for setting, text in event.settings.items()
        if setting.startswith("staleness.")
    ]
    if not changes:
        return []
    shown = ", ".join([*changes[:5], *([f"and {len(changes) - 5} more"] if len(changes) > 5 else [])])
    return [
        f'Settings were changed while the run went on: {shown}. "{RECORDED}" follows them; other bounds stay as they are named.'
    ]


def _lengths(recording: Recording) -> dict[int, list[int]]:
    """Return the tokens of each completion, by lease that brought a group."""
    return {
        event.lease_id: [completion.num_tokens for completion in event.completions]
        for event in recording.events
        if isinstance(event, Accepted)
    }


def _mean_length(lengths: Mapping[int, Sequence[int]], lease_ids: Sequence[int]) -> float | None:
    found = [length for lease_id in lease_ids for length in lengths[lease_id]]
    return statistics.fmean(found) if found else None


# What is printed


def _verdict(report: Report) -> RenderableType:
    row = report.recorded
    head = Text(f"recorded settings ({row.label}), replayed: ", style="bold")
    if report.differences:
        head.append("NOT as recorded\n", style="red")
        head.append("\n".join(report.differences[:5]))
        head.append(
            "\nThe tables below cannot be trusted. Was the run resumed with other settings of [staleness] or [train]? A replay "
            "knows the last ones only."
        )
        return head
    head.append("exact", style="green")
    dropped = sum(row.dropped.values())
    head.append(f": {row.num_admitted} admissions, {dropped} drops, {row.num_batches} batches, and every lag are as recorded")
    return head


def _bound_table(report: Report) -> FittedTable:
    names = ("bound", "admitted", "not", "older", "trained", "stale", "aborted", "else", "left", "batches", "seconds")
    rows: list[tuple[str, ...]] = []
    for name, row in _named_rows(report):
        other = sum(count for reason, count in row.dropped.items() if reason not in ("stale", "aborted")) + row.num_expired
        numbers = [row.num_admitted, row.num_recorded - row.num_admitted, row.num_older, row.num_trained]
        numbers += [row.dropped.get("stale", 0), row.dropped.get("aborted", 0), other, row.num_left, row.num_batches]
        lengths = f"{number(row.length_trained, '.1f')} / {number(row.length_generated, '.1f')}"
        rows.append((name, row.label, *map(str, numbers), f"{row.duration_s:.1f}", lengths))
    title = f"Of {report.recorded.num_recorded} recorded leases"
    return table(("", *names, "length trained / generated"), rows, texts=("", "bound"), title=title)


def _lag_table(report: Report) -> FittedTable:
    shown = [*map(str, range(MAX_SHOWN_LAG)), f"{MAX_SHOWN_LAG}+"]
    rows: list[tuple[str, ...]] = []
    for name, row in _named_rows(report):
        counts = Counter[str]()
        for lag, count in row.lags.items():
            counts[shown[min(int(lag), MAX_SHOWN_LAG)]] += count
        shares = [f"{counts[lag] / row.num_trained:.0%}" if counts[lag] else "" for lag in shown]
        numbers = (number(row.lag_mean, ".2f"), number(row.lag_max, "d"), number(row.over_bound, ".1%"))
        rows.append((name, row.label, *numbers, *shares))
    head = ("", "bound", "mean", "max", "over bound", *shown)
    return table(head, rows, texts=("", "bound"), title="Lag of the groups trained")


def _named_rows(report: Report) -> list[tuple[str, BoundRow]]:
    return [(RECORDED, report.recorded), *(("", row) for row in report.bounds)]


def _gradient_table(rows: "Sequence[GradientRow]") -> FittedTable:
    versions = sorted({row.policy_version for row in rows})
    title = (
        f"Gradients without a step, means over checkpoints {', '.join(map(str, versions))}. Cosine: with the gradient of "
        'the freshest groups; "fresh" is another batch as fresh, and a cosine that is no lower shows no harm of staleness.'
    )
    texts = ("objective", "lags of")
    head = (*texts, "lag", "seen", "clipped", "masked", "log ratio", "ESS", "norm / fresh", "cosine", "min–max")
    cells: list[tuple[str, ...]] = []
    of_row: dict[tuple[str, str], list[GradientRow]] = {}
    for row in rows:
        of_row.setdefault((row.objective, row.bound), []).append(row)
    for (objective, bound), found in of_row.items():
        masked = [row.masked_fraction for row in found if row.masked_fraction is not None]
        cosines = [row.cosine for row in found if row.cosine is not None]
        norms = [row.grad_norm / row.fresh_grad_norm for row in found if row.fresh_grad_norm]
        numbers = (
            f"{statistics.fmean(row.lag_mean for row in found):.2f}",
            f"{statistics.fmean(row.seen_fraction for row in found):.0%}",
            f"{statistics.fmean(row.clip_fraction for row in found):.1%}",
            f"{statistics.fmean(masked):.1%}" if masked else "",
            f"{statistics.fmean(row.ratio_log_mean for row in found):.1e} ± "
            f"{statistics.fmean(row.ratio_log_std for row in found):.1e}",
            f"{statistics.fmean(row.ess_sequence for row in found):.2f}",
            f"{statistics.fmean(norms):.2f}" if norms else "",
            f"{statistics.fmean(cosines):.3f}" if cosines else "",
            f"{min(cosines):.3f}–{max(cosines):.3f}" if cosines else "",
        )
        cells.append((objective, bound, *numbers))
    return table(head, cells, texts=texts, title=title)
