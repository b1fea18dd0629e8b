"""The state of a restarted learner: ledger, buffer, prompt stream and changed settings, from its checkpoint and the log.

    checkpoint state -> log records after it -> the state at the moment of death, except for training, which is done again

`Trained` is the one event that is not applied: the weights it made died with the learner, so its groups are in the buffer
again, and are trained again without being generated again. They follow the order of their leases, so one that was late before
has its turn.

Behind a gap in the log, events are applied as far as they can be:

- A lease whose grant was lost is unknown: its other events are skipped, and its prompt is re-queued.
- A lease whose prompt was granted again ended in the gap.
- A group that was lost is generated again: its lease counts as being generated until its actor turns out not to have it.
- A turn that the shares known before the gap leave out is left out; the lease of one that other shares, lost in the gap, had
  kept is unknown.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, assert_never

from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.records.rows import CommitRow, EvalRow, StepRow
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, Started, Trained, Tuned, Weighed
from offbeat.learner.leases.groups import Group, make_group
from offbeat.learner.leases.journal import DispatcherState, apply_event
from offbeat.learner.leases.ledger import Ledger
from offbeat.learner.leases.log_reading import Gap, Position, Record
from offbeat.learner.leases.prompt_stream import PromptStream, PromptTurn
from offbeat.learner.leases.prompts import Prompt

logger = logging.getLogger(__name__)

LOST = "log_damaged"
"""Reason for the end of a lease whose own end was lost with a part of the log."""


class RecoveryError(ServiceError):
    """Log and checkpoint contradict each other; the text names the record and what to do."""


class Appended(NamedTuple):
    """Prompts that were added to the end of the data, and that no pass over the data has had yet."""

    num_before: int
    num_prompts: int
    """Number of prompts with those that were added."""
    epoch: int
    """The first pass that will have them."""


class Recovered(NamedTuple):
    """The recovered state of a run."""

    stream: PromptStream
    ledger: Ledger
    newest_version: int
    """The newest policy version that any process of the run made."""
    num_records: int
    """Records read after the checkpoint."""
    tuned: dict[str, Tuned]
    """See `DispatcherState.tuned`."""
    gaps: tuple[Gap, ...] = ()
    """Places after the checkpoint where the log is damaged."""
    num_skipped: int = 0
    """Records behind a gap that could not be applied."""
    appended: Appended | None = None
    """Prompts added to the end of the data; None if there are none."""


def recover(
    state: DispatcherState | None,
    records: Iterable[Record | Gap],
    read: Callable[[Position], Record | None],
    prompts: Sequence[Prompt],
    seed: int,
) -> Recovered:
    """Rebuild the state from a checkpoint (None: from the run's beginning) and the log's `records` and gaps after it.

    `read` returns the record at a position, or None when the log no longer has it. Raises `RecoveryError` when log and
    checkpoint contradict each other, and `SettingError` when there are fewer prompts than there were, or none of a task that
    had a share.
    """
    tasks = [prompt.task for prompt in prompts]
    names = frozenset(tasks)
    if state is None:
        stream, ledger, newest_version, tuned = PromptStream(len(prompts), seed, tasks=tasks), Ledger(), 0, {}
    else:
        _require_tasks(state.stream.shares, names)
        stream = PromptStream.from_state(state.stream, tasks)
        _require_prompts(stream.num_prompts, len(prompts))
        ledger, newest_version, tuned = Ledger.from_state(state.ledger), state.newest_version, dict(state.tuned)
        _refill(ledger, state, read, prompts)
    num_records = num_skipped = 0
    gaps: list[Gap] = []
    for record in records:
        if isinstance(record, Gap):
            gaps.append(record)
            continue
        num_records += 1
        match record.event:
            case Started():
                # The previous process may have granted leases after its last record.
                ledger.skip_lease_ids()
            case Trained(policy_version=version, num_steps=num_steps):
                newest_version = max(newest_version, version + num_steps)
            case Tuned(settings=settings) as event:
                tuned |= dict.fromkeys(settings, event)
            case Weighed(shares=shares):
                _require_tasks(shares, names)
                stream.weigh(shares)
            case Granted() | Accepted() | Dropped() | Expired() as event:
                if isinstance(event, Granted):
                    _follow_size(event, stream, len(prompts))
                if gaps and not _make_applicable(event, ledger, stream):
                    num_skipped += 1
                else:
                    _apply(record, ledger, stream, prompts)
                if isinstance(event, Granted):
                    # The batch that made this version may be lost.
                    newest_version = max(newest_version, event.policy_version)
            case _:
                assert_never(record.event)
    ledger.skip_lease_ids()
    appended = None
    if (num_before := stream.num_prompts) != len(prompts):
        appended = Appended(num_before, len(prompts), stream.grow(len(prompts)))
    return Recovered(stream, ledger, newest_version, num_records, tuned, tuple(gaps), num_skipped, appended)


def _follow_size(event: Granted, stream: PromptStream, num_prompts: int) -> None:
    """Give the stream's passes the size that they had when this lease was granted; there are `num_prompts` now."""
    if event.epoch_size != stream.size_of(event.epoch):
        _require_prompts(event.epoch_size, num_prompts)
        stream.grow(event.epoch_size)


def _require_prompts(num_before: int, num_prompts: int) -> None:
    """Raise `SettingError` when prompts were taken away."""
    if num_prompts < num_before:
        problem = f"the run was made with {num_before} prompts, and data.train_data now has {num_prompts}"
        raise SettingError("run.resume", True, problem, "Resume with the same data and prompt settings, or start a new run.")


def _require_tasks(shares: Mapping[str, float], tasks: frozenset[str]) -> None:
    """Raise `SettingError` when a task that has a share is not there any more."""
    absent = sorted(shares.keys() - tasks)
    if absent:
        problem = f"data.curriculum gave a share to the task {absent[0]!r}, of which data.train_data has no prompt now"
        raise SettingError("run.resume", True, problem, "Resume with data.task_field as it was, or start a new run.")


def _make_applicable(event: Granted | Accepted | Dropped | Expired, ledger: Ledger, stream: PromptStream) -> bool:
    """Bring ledger and stream to where this event, behind a gap, can follow; return False when nothing can do that."""
    if not isinstance(event, Granted):
        return ledger.status(event.lease_id) in ("generating", "ready")
    before = ledger.holding(event.prompt_id, event.epoch)
    if before is not None:
        end = Expired(at=event.at, lease_id=before.lease_id, reason=LOST)
        if before.is_ready:
            end = Dropped(at=event.at, lease_id=before.lease_id, reason=LOST, is_final=False)
        apply_event(end, ledger, stream)
    return stream.bring_forward(PromptTurn(event.prompt_id, event.epoch))


def _refill(
    ledger: Ledger, state: DispatcherState, read: Callable[[Position], Record | None], prompts: Sequence[Prompt]
) -> None:
    """Restore the groups that lay in the buffer when the checkpoint was written.

    The lease of a group that the log lost stays open, as if it were being generated: the dispatcher takes it back when its
    actor turns out not to have it either. Taking it back here would change the history that the log's records continue.
    """
    num_lost = 0
    ready = [saved for saved in state.ledger.open if saved.is_ready]
    # The groups return to the buffer in their order of arrival.
    for saved in sorted(ready, key=lambda saved: saved.position or Position(0, 0)):
        record = read(saved.position) if saved.position is not None else None
        if record is not None and isinstance(record.event, Accepted) and record.event.lease_id == saved.lease_id:
            _require_prompt(record.event, prompts[saved.prompt_id])
            ledger.restore(make_group(record.event, record.arrays, prompts[saved.prompt_id]), saved.position)
        else:
            num_lost += 1
    if num_lost:
        logger.warning("%d finished groups were lost with the learner and are generated again", num_lost)


def _apply(record: Record, ledger: Ledger, stream: PromptStream, prompts: Sequence[Prompt]) -> None:
    event = record.event
    try:
        group: Group | None = None
        if isinstance(event, Granted):
            _require_prompt(event, prompts[event.prompt_id])
        elif isinstance(event, Accepted):
            prompt = prompts[ledger.find(event.lease_id).prompt_id]
            _require_prompt(event, prompt)
            group = make_group(event, record.arrays, prompt)
        apply_event(event, ledger, stream, group, record.position if group is not None else None)
    except (KeyError, AssertionError, ValueError) as error:
        raise RecoveryError(
            f"the rollout log does not continue the checkpoint: record {record.position} ({type(event).__name__}): {error}. If "
            "data.train_data, data.task_field or run.seed was changed, change it back; to go on without the log's later "
            "groups, move the folder `log` out of run.dir"
        ) from error


def _require_prompt(event: Granted | Accepted, prompt: Prompt) -> None:
    """Raise `RecoveryError` when the data has another prompt now than the one that the lease was granted for."""
    if event.prompt_hash != prompt.content_hash:
        raise RecoveryError(
            f"lease {event.lease_id} was granted for another prompt than prompt {prompt.prompt_id} of data.train_data is now: "
            "its text, tokens, row or weight was changed. Change the data back, or begin a new run in another run.dir"
        )


def newest_in_rows(run_folder: Path) -> int:
    """Return the newest version that the run's rows have, of a step or of an actor's weights; 0 for none.

    Without a log nothing else tells what was made after the checkpoint, and actors may still be at groups begun under it.
    """
    return max((row.policy_version for row in read_rows_of(run_folder / ROWS_FILE, StepRow, CommitRow)), default=0)


def last_evaluated(run_folder: Path, policy_version: int) -> int:
    """Return the newest version up to this one whose evaluation the run's rows have; -1 for none.

    Evaluations of steps that a resumed run made again do not count: those weights are gone.
    """
    versions, step = [-1], 0
    for row in read_rows_of(run_folder / ROWS_FILE, EvalRow, StepRow):
        if isinstance(row, EvalRow):
            versions.append(row.policy_version)
            continue
        if row.policy_version <= step:
            versions = [version for version in versions if version < row.policy_version]
        step = row.policy_version
    return max(version for version in versions if version <= policy_version)
