"""The audit of a run's folder: every lease followed through the rollout log and compared with the learner's report.

It counts the leases a second time and in another way than `learner.leases.ledger`, which it does not use.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from rich.text import Text

from offbeat.common.records.rows import CanaryRow, EventRow, FinalRow, LedgerSums
from offbeat.common.records.run_folder import CHECKPOINTS, LOG
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import replace_settings
from offbeat.lab.prompt_order import PromptAudit, PromptOrder
from offbeat.lab.terminal import FittedTable, stdout_console, table
from offbeat.learner.dispatch.live_settings import CANARY_TOLERANCE
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained
from offbeat.learner.leases.log_reading import Gap, LogDamagedError, Position, read_history
from offbeat.learner.leases.prompt_stream import PromptTurn
from offbeat.learner.training import checkpoints

_READABLE = "the rollout log is readable to its end"


class Check(NamedTuple):
    """One claim about the run, with the violations found."""

    claim: str
    violations: list[str]
    seen: str
    """The evidence that was checked, with numbers."""


class AuditedLease(msgspec.Struct):
    """The course of one lease, as the log tells it."""

    turn: PromptTurn
    actor: str
    place: int
    """Number of leases that were granted before."""
    num_granted: int | None = None
    """Number of leases that were granted when its group was accepted; None without a group."""
    end: str = ""
    """`trained`, `expired`, or `dropped/REASON`; empty while it is in flight."""
    is_final: bool = False
    """True when the prompt's turn is over: it must not be leased again in this epoch."""

    @property
    def is_accepted(self) -> bool:
        """True when its group was accepted."""
        return self.num_granted is not None


class Lost(NamedTuple):
    """Leases and prompts whose events were destroyed on purpose; their flaws are no violations."""

    lease_ids: frozenset[int]
    turns: frozenset[PromptTurn]
    num_batches: int

    @classmethod
    def of(cls, events: Sequence[LeaseEvent]) -> "Lost":
        """Collect the leases, turns and batches of these events."""
        batches = [event for event in events if isinstance(event, Trained)]
        of_one = {event.lease_id for event in events if isinstance(event, Granted | Accepted | Dropped | Expired)}
        turns = frozenset(PromptTurn(event.prompt_id, event.epoch) for event in events if isinstance(event, Granted))
        return cls(frozenset(of_one.union(*(batch.lease_ids for batch in batches))), turns, len(batches))


NOTHING_LOST = Lost.of(())


class LogAudit:
    """Reads the events of one run in order and collects the contradictions between them."""

    def __init__(self, *, is_whole: bool, lost: Lost = NOTHING_LOST) -> None:
        """`is_whole`: True when the log begins where the run began, and nothing was deleted."""
        self._is_whole = is_whole
        self._lost = lost
        self.leases: dict[int, AuditedLease] = {}
        self.batches: list[Trained] = []
        """Batches that are in the weights. A restart from an older checkpoint removes the batches after it."""
        self.turns: dict[PromptTurn, list[int]] = {}
        """The leases of each prompt's turn, in order. Turns are in the order of their first lease."""
        self.epoch_sizes: dict[int, int] = {}
        """Number of prompts of each epoch, as its grants tell."""
        self.num_starts = 0
        self.num_undone = 0
        """Batches that a restart from an older checkpoint undid."""
        self.lease_flaws: list[str] = []
        self.training_flaws: list[str] = []
        self.prompt_flaws: list[str] = []
        self._waiting: dict[PromptTurn, tuple[int, int]] = {}
        """Turns that must be leased again, with their last lease, which ended untrained, and the number of turns by then."""
        self._version: int | None = 0 if is_whole else None
        """Optimizer steps behind the weights; None until an event of a log without its beginning tells."""
        self._num_batches_excused = 0
        self.num_unknown = 0
        """Number of events of leases whose grant is not in the log, or not any more."""
        self._has_gap = False
        self._doubtful: set[int] = set()
        """Leases that were open at a gap in the log."""
        self.order = PromptOrder()

    def take(self, event: LeaseEvent) -> None:
        """Add the next event."""
        self.order.take(event)
        match event:
            case Started():
                self._start(event.policy_version)
            case Granted():
                self._grant(event)
            case Accepted():
                self._accept(event)
            case Dropped():
                self._end(event.lease_id, f"dropped/{event.reason}", is_final=event.is_final)
            case Expired():
                life = self.leases.get(event.lease_id)
                if life is not None and life.is_accepted and not life.end:
                    self._flaw(self.lease_flaws, event.lease_id, "expired although its group had been accepted")
                self._end(event.lease_id, "expired", is_final=False)
            case Trained():
                self._train(event)

    def lose(self) -> None:
        """Take note of a gap: what happened in it is unknown, and contradictions that it can explain are no flaws."""
        self._is_whole = False
        self._has_gap = True
        self._version = None
        self._doubtful |= {lease_id for lease_id, life in self.leases.items() if not life.end}

    def lost_turns(self) -> list[str]:
        """Return a sentence for each prompt that was given back and not leased again, although newer prompts were."""
        return [
            f"prompt {turn.prompt_id} of epoch {turn.epoch} was not leased again after lease {lease_id} "
            f"({self.leases[lease_id].end}), but newer prompts were"
            for turn, (lease_id, num_turns) in self._waiting.items()
            if num_turns < len(self.turns) and not self._has_gap
        ]

    def passed_over(self) -> list[str]:
        """Return a sentence for each waiting group that came before the grant of a lease that is trained: oldest go first."""
        found: list[str] = []
        newest = max((life.place for life in self.leases.values() if life.end == "trained"), default=-1)
        for lease_id, life in self.leases.items():
            if life.num_granted is not None and not life.end and life.num_granted <= newest:
                self._flaw(found, lease_id, "its group was accepted and not trained, but those of later leases were")
        return found

    def _start(self, version: int) -> None:
        self.num_starts += 1
        self._undo(version)
        if self._version is not None and self._version < version:
            self._miss_batch(f"started at version {version}, but batches are known only up to {self._version}")
        self._version = version

    def _undo(self, version: int) -> None:
        """Take back the batches from `version` on: their weights died with a learner."""
        while self.batches and self.batches[-1].policy_version + self.batches[-1].num_steps > version:
            batch = self.batches.pop()
            self.num_undone += 1
            if batch.policy_version < version:
                self.training_flaws.append(f"version {version} lies within the batch of version {batch.policy_version}")
            for lease_id in batch.lease_ids:
                if lease_id in self.leases:
                    self.leases[lease_id].end, self.leases[lease_id].is_final = "", False

    def _grant(self, event: Granted) -> None:
        turn = PromptTurn(event.prompt_id, event.epoch)
        size = self.epoch_sizes.setdefault(event.epoch, event.epoch_size)
        if size != event.epoch_size:
            text = f"epoch {event.epoch} had {size} prompts, and now has {event.epoch_size}"
            self._flaw(self.prompt_flaws, event.lease_id, text)
        if event.lease_id in self.leases:
            self._flaw(self.lease_flaws, event.lease_id, "granted twice")
        previous = self.turns.setdefault(turn, [])
        if previous:
            before = self.leases[previous[-1]]
            if not before.end or before.is_final:
                text = f"{before.end or 'in flight'}, but its prompt {turn.prompt_id} of epoch {turn.epoch} was leased again"
                self._flaw(self.prompt_flaws, previous[-1], text)
        self._waiting.pop(turn, None)
        previous.append(event.lease_id)
        self.leases[event.lease_id] = AuditedLease(turn, event.actor, len(self.leases))

    def _accept(self, event: Accepted) -> None:
        life = self._open(event.lease_id, "accepted")
        if life is None:
            return
        if life.is_accepted:
            self._flaw(self.lease_flaws, event.lease_id, "accepted twice")
        if life.actor != event.actor:
            self._flaw(self.lease_flaws, event.lease_id, f"leased to {life.actor}, but accepted from {event.actor}")
        life.num_granted = len(self.leases)

    def _end(self, lease_id: int, end: str, *, is_final: bool) -> None:
        life = self._open(lease_id, end)
        if life is None:
            return
        life.end, life.is_final = end, is_final
        if not is_final:
            self._waiting.setdefault(life.turn, (lease_id, len(self.turns)))

    def _train(self, event: Trained) -> None:
        if self._version is None:
            # The restart that undid newer batches may be lost.
            self._undo(event.policy_version)
        if self._version is not None and event.policy_version != self._version:
            self._miss_batch(f"a batch was trained at version {event.policy_version}, where {self._version} was next")
        self._version = event.policy_version + event.num_steps
        self.batches.append(event)
        for lease_id in event.lease_ids:
            life = self._open(lease_id, f"trained at version {event.policy_version}")
            if life is None:
                continue
            if not life.is_accepted:
                self._flaw(self.training_flaws, lease_id, "trained without having been accepted")
            life.end, life.is_final = "trained", True

    def _open(self, lease_id: int, what: str) -> AuditedLease | None:
        """Return the lease that `what` happened to, None for an unknown one; record a flaw where it had already ended."""
        life = self.leases.get(lease_id)
        if life is None:
            # A log whose beginning was deleted lacks the grants of old leases.
            self.num_unknown += 1
            if self._is_whole:
                self._flaw(self.lease_flaws, lease_id, f"{what}, but never granted")
            return None
        if life.end:
            flaws = self.training_flaws if what.startswith("trained") else self.lease_flaws
            self._flaw(flaws, lease_id, f"{what}, but it had ended: {life.end}")
        return life

    def _miss_batch(self, text: str) -> None:
        if self._num_batches_excused < self._lost.num_batches:
            self._num_batches_excused += 1
        else:
            self.training_flaws.append(text)

    def _flaw(self, flaws: list[str], lease_id: int, text: str) -> None:
        if lease_id not in self._lost.lease_ids and lease_id not in self._doubtful:
            flaws.append(f"lease {lease_id}: {text}")


def audit(run: Path, config: Config, lost_events: Sequence[LeaseEvent] = ()) -> list[Check]:
    """Return all checks of the run in a folder; `lost_events` were destroyed on purpose."""
    lost = Lost.of(lost_events)
    checks: list[Check] = []
    final = final_row(run)
    if (run / LOG).exists():
        checks += audit_log(run / LOG, config, final, lost)
    elif config.log.enabled:
        checks.append(Check(_READABLE, [f"{run / LOG} does not exist"], ""))
    return [
        *checks,
        check_canaries(list(read_rows_of(run / ROWS_FILE, CanaryRow)), _tolerances(run, config)),
        check_checkpoints(run / CHECKPOINTS, has_ended=final is not None),
    ]


def print_checks(checks: Sequence[Check]) -> bool:
    """Print the checks as a table; return True when none is violated."""
    stdout_console().print(claim_table(checks))
    return not any(check.violations for check in checks)


def claim_table(checks: Iterable[Check]) -> FittedTable:
    """Return a row for each claim: the evidence seen, or its first five violations."""
    rows: list[tuple[str | Text, ...]] = []
    for claim, violations, seen in checks:
        shown = [*violations[:5], *([f"... and {len(violations) - 5} more"] if len(violations) > 5 else [])]
        verdict = Text("VIOLATION", style="red") if violations else Text("OK", style="green")
        rows.append((claim, verdict, "\n".join(shown) or seen))
    return table(("claim", "", "detail"), rows, texts=("claim", "", "detail"))


def audit_log(folder: Path, config: Config, final: FinalRow | None, lost: Lost) -> list[Check]:
    """Return the checks of the rollout log, read from disk; `final` is the run's last metrics row."""
    is_whole = is_log_whole(folder)
    log = LogAudit(is_whole=is_whole, lost=lost)
    prompts = PromptAudit()
    num_records, group_flaws, damage = 0, [], []
    gaps: list[tuple[Gap, int]] = []
    try:
        for found in read_history(folder):
            if isinstance(found, Gap):
                gaps.append((found, log.num_starts))
                log.lose()
                continue
            num_records += 1
            log.take(found.event)
            prompts.take(found.event)
            if isinstance(found.event, Accepted):
                group_flaws += _group_flaws(found.event, found.arrays)
    except LogDamagedError as error:
        damage.append(str(error))
    # A learner that started behind a gap took account of it.
    damage += [f"{gap}; resume the run to go on without it" for gap, num_starts in gaps if num_starts == log.num_starts]
    is_whole = is_whole and not gaps
    remarks = [str(gap) for gap, _ in gaps]
    if gaps:
        remarks.append(f"{log.num_unknown} events of leases whose grant was lost; all other records are used")
    elif not is_whole:
        remarks.append("its beginning was deleted (log.retain_mb)")
    num_batches = f"{len(log.batches)} batches kept, {log.num_undone} undone by {max(log.num_starts - 1, 0)} restarts"
    num_accepted = sum(life.is_accepted for life in log.leases.values())
    return [
        Check(_READABLE, damage, "; ".join([f"{num_records} records", *remarks])),
        Check("every lease ends once", log.lease_flaws, f"{len(log.leases)} leases"),
        Check("no group is trained twice, each was accepted", log.training_flaws, num_batches),
        Check("accepted groups are whole", group_flaws, f"{num_accepted} groups"),
        Check(
            "each trained group's prompt is the one that was leased",
            prompts.flaws,
            f"{prompts.num_compared} of {prompts.num_trained} trained groups compared",
        ),
        check_conservation(log, final.ledger if final else None, is_whole=is_whole, lost=lost),
        check_prompts(log, config.run.seed, _epoch_sizes(log) if is_whole else None, lost),
    ]


def check_conservation(log: LogAudit, reported: LedgerSums | None, *, is_whole: bool, lost: Lost) -> Check:
    """Check that the log's sums are the learner's own, and that these add up."""
    claim = "leased = trained + dropped + expired + in flight, as the learner says"
    ends = Counter(life.end.partition("/")[0] or "in_flight" for life in log.leases.values())
    sums = {"leased": len(log.leases), **{name: ends[name] for name in ("trained", "dropped", "expired", "in_flight")}}
    seen = ", ".join(f"{name} {number}" for name, number in sums.items())
    if reported is None or not is_whole:
        return Check(claim, [], f"{seen}; not compared: {'the log is not whole' if reported else 'the run has not ended'}")
    said = {**msgspec.structs.asdict(reported), "dropped": sum(reported.dropped.values())}
    violations = [
        f"{name}: the log has {number}, the learner said {said[name]}"
        for name, number in sums.items()
        if abs(number - said[name]) > len(lost.lease_ids)
    ]
    if reported.leased != reported.num_accounted:
        violations.append(f"the learner's own sums do not add up: {reported}")
    return Check(claim, violations, seen)


def check_prompts(log: LogAudit, seed: int, sizes: Sequence[int] | None, lost: Lost) -> Check:
    """Check that prompts come in the seed's order and none is skipped; without the `sizes` of epochs, only the latter."""
    violations = [*log.prompt_flaws, *log.lost_turns(), *log.passed_over()]
    turns = list(log.turns)
    seen = f"{len(turns)} turns"
    if sizes is None:
        return Check("prompts keep to the seed's order, none is lost", violations, f"{seen}; the order was not checked")
    for epoch in range(1, len(sizes)):
        if sizes[epoch] < sizes[epoch - 1]:
            violations.append(f"epoch {epoch} has {sizes[epoch]} prompts, the one before it had {sizes[epoch - 1]}")
    out_of_order, left_out = log.order.compare(seed, sizes, lost.turns)
    violations += out_of_order
    seen += f" of {', then '.join(map(str, dict.fromkeys(sizes)))} prompts"
    if num_left_out := left_out.total():
        seen += f", and {num_left_out} that the shares of tasks left out"
    return Check("prompts keep to the seed's order, none is lost", violations, seen)


def _tolerances(run: Path, config: Config) -> list[float | None]:
    """Return every value of `weights.canary_tolerance` that was in force, in nats; None: the limits were measured."""
    events = read_rows_of(run / ROWS_FILE, EventRow)
    changes = [{row.setting: row.after} for row in events if row.after and row.setting == CANARY_TOLERANCE]
    in_force = [config, *(replace_settings(config, change) for change in changes)]
    return [one.weights.canary_tolerance for one in in_force]


def check_canaries(rows: Sequence[CanaryRow], tolerances: Sequence[float | None]) -> Check:
    """Check that every actor sampled with the weights it reported, by the most lenient of the tolerances (`_tolerances`)."""
    tolerance = max((one for one in tolerances if one is not None), default=0.0)

    def is_right(row: CanaryRow) -> bool:
        if row.max_abs_diff is None:
            return False
        if row.max_abs_diff <= tolerance:
            return True
        return None in tolerances and row.excess is not None and row.excess <= 1

    violations = [f"{row.actor} at version {row.policy_version}: {_difference(row)}" for row in rows if not is_right(row)]
    largest = max((row.max_abs_diff or 0.0 for row in rows), default=0.0)
    return Check("actors sampled with the weights they said", violations, f"{len(rows)} canaries, largest {largest:.1e}")


def _difference(row: CanaryRow) -> str:
    return f"{row.max_abs_diff}" if row.excess is None else f"{row.max_abs_diff}, {row.excess:.2g} times the limits"


def check_checkpoints(root: Path, *, has_ended: bool) -> Check:
    """Check that every checkpoint is as it was written, and that a run that `has_ended` left no unfinished one."""
    partial = [folder.name for folder in sorted(root.glob("step-*.partial"))]
    damage = {folder: checkpoints.find_damage(folder) for folder in sorted(checkpoints.whole(root))}
    # The learner of a run that goes on may have deleted a checkpoint while it was read.
    found = {folder.name: flaw for folder, flaw in damage.items() if flaw is None or folder.exists()}
    violations = [f"{name} is left over" for name in partial if has_ended]
    violations += [f"{name}: {flaw}" for name, flaw in found.items() if flaw]
    remarks = [f"{name} is unfinished" for name in partial if not has_ended]
    remarks += [f"{folder.name} was set aside" for folder in sorted(root.glob("step-*.damaged*"))]
    return Check("checkpoints are whole", violations, ", ".join([*found, *remarks]) or "none")


def _group_flaws(event: Accepted, arrays: Sequence[memoryview]) -> list[str]:
    logprobs = np.frombuffer(arrays[1], dtype="<f4")
    num_tokens = sum(completion.num_tokens for completion in event.completions)
    if len(logprobs) != num_tokens or len(arrays[0]) != len(arrays[1]):
        return [f"lease {event.lease_id}: {len(logprobs)} log-probs for {num_tokens} tokens"]
    if not (np.isfinite(logprobs).all() and logprobs.max(initial=0) <= 1e-4):
        return [f"lease {event.lease_id}: impossible log-probs"]
    return []


def is_log_whole(folder: Path) -> bool:
    """Return True when a rollout log begins where its run began."""
    try:
        return not isinstance(next(read_history(folder, Position(0, 0)), None), Gap)
    except LogDamagedError:
        return False


def _epoch_sizes(log: LogAudit) -> list[int]:
    """Return the number of prompts of each epoch that began."""
    known = log.epoch_sizes
    # Of an epoch whose grants are lost, the next one tells: data only grows.
    return [known[min(one for one in known if one >= epoch)] for epoch in range(max(known, default=-1) + 1)]


def final_row(run: Path) -> FinalRow | None:
    """Return the row that ends the run; None when it was resumed after that, or has not ended."""
    final = None
    for row in read_rows_of(run / ROWS_FILE, EventRow, FinalRow):
        if isinstance(row, FinalRow):
            final = row
        elif row.event == "run_started":
            final = None
    return final
