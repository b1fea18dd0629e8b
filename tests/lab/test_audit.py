"""The audit sees each thing that must not happen, in histories made by hand."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from offbeat.common.records.rows import CanaryRow, EventRow, FinalRow, LedgerSums, Row
from offbeat.common.records.writer import MetricsWriter
from offbeat.common.settings.config import Config, DataSection, RunSection
from offbeat.common.settings.loading import load, resolved_toml
from offbeat.lab.audit import (
    NOTHING_LOST,
    Check,
    LogAudit,
    Lost,
    audit,
    check_canaries,
    check_checkpoints,
    check_conservation,
    check_prompts,
)
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained, Tuned
from offbeat.learner.leases.log_reading import read_log
from offbeat.learner.leases.prompt_stream import PromptStream
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.learner.training import checkpoints
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.learner.leases.event_makers import make_accepted, make_granted, make_trained

SEED = 3
NUM_PROMPTS = 4


def order(epoch: int) -> list[int]:
    return [int(prompt_id) for prompt_id in np.random.default_rng([SEED, epoch]).permutation(NUM_PROMPTS)]


def started(version: int = 0) -> Started:
    return Started(at=0, run_id="r", learner_incarnation=1, policy_version=version)


def sizes(log: LogAudit) -> list[int]:
    return [NUM_PROMPTS] * (max((turn.epoch for turn in log.turns), default=0) + 1)


def granted(lease_id: int, turn: int | None = None, actor: str = "a") -> Granted:
    """Return the grant of a lease for the prompt of the run's `turn`-th turn (default: `lease_id`)."""
    epoch, index = divmod(lease_id if turn is None else turn, NUM_PROMPTS)
    return make_granted(lease_id, prompt_id=order(epoch)[index], epoch=epoch, actor=actor, epoch_size=NUM_PROMPTS)


def accepted(lease_id: int, actor: str = "a") -> Accepted:
    completion = CompletionMeta(num_tokens=2, finish_reason="stop", reward=1.0, segments=(Segment(0, 0),))
    return make_accepted(lease_id, actor=actor, completions=(completion,), generate_s=0.1)


def dropped(lease_id: int, *, is_final: bool = False) -> Dropped:
    return Dropped(at=0, lease_id=lease_id, reason="stale", is_final=is_final)


def expired(lease_id: int) -> Expired:
    return Expired(at=0, lease_id=lease_id, reason="lost")


def trained(version: int, *lease_ids: int) -> Trained:
    return make_trained(*lease_ids, policy_version=version, prompt_hashes=(0,) * len(lease_ids))


def followed(*events: LeaseEvent, is_whole: bool = True, lost: Lost = NOTHING_LOST) -> LogAudit:
    log = LogAudit(is_whole=is_whole, lost=lost)
    for event in events:
        log.take(event)
    return log


def flaws(*events: LeaseEvent, lost: Lost = NOTHING_LOST) -> list[str]:
    """Return all violations in a history."""
    log = followed(*events, lost=lost)
    return [*log.lease_flaws, *log.training_flaws, *check_prompts(log, SEED, sizes(log), lost).violations]


GOOD: list[LeaseEvent] = [
    *(started(), granted(0), granted(1), granted(2), accepted(1), accepted(0), trained(0, 0, 1)),
    # Lease 2 is lost with its actor, and its prompt is re-queued before a new one.
    *(expired(2), granted(10, turn=2, actor="b"), granted(11, turn=3), accepted(10, "b"), accepted(11), trained(1, 10, 11)),
    # The learner dies; its newest checkpoint is of version 1, and the second batch is trained again.
    *(started(1), trained(1, 10, 11)),
    *(granted(12, turn=4), accepted(12), dropped(12), granted(13, turn=4), granted(14, turn=5)),
    # A setting is changed, which touches no lease.
    Tuned(at=0, settings={"staleness.max_staleness": "8"}, who="me", reason="", policy_version=2),
]


def test_good_history_has_no_flaw() -> None:
    assert flaws(*GOOD) == []
    log = followed(*GOOD)
    assert [batch.policy_version for batch in log.batches] == [0, 1]
    assert (log.num_starts, log.num_undone) == (2, 1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([trained(2, 10)], "lease 10: trained at version 2, but it had ended: trained"),
        ([trained(2, 13)], "lease 13: trained without having been accepted"),
        ([accepted(14), trained(1, 14)], "a batch was trained at version 1, where 2 was next"),
        ([started(3)], "started at version 3, but batches are known only up to 2"),
        ([granted(13, turn=6)], "lease 13: granted twice"),
        ([accepted(12)], "lease 12: accepted, but it had ended: dropped/stale"),
        ([accepted(13), accepted(13)], "lease 13: accepted twice"),
        ([accepted(13, "b")], "lease 13: leased to a, but accepted from b"),
        ([accepted(99)], "lease 99: accepted, but never granted"),
        ([accepted(13), expired(13)], "lease 13: expired although its group had been accepted"),
        ([expired(2)], "lease 2: expired, but it had ended: expired"),
        ([granted(15, turn=4)], f"lease 13: in flight, but its prompt {order(1)[0]} of epoch 1 was leased again"),
        ([granted(15, turn=0)], f"lease 0: trained, but its prompt {order(0)[0]} of epoch 0 was leased again"),
        (
            [granted(15, turn=7)],
            f"prompt {order(1)[3]} of epoch 1 was leased when it was the turn of prompt {order(1)[2]} of epoch 1",
        ),
        ([expired(14), granted(15, turn=6)], f"prompt {order(1)[1]} of epoch 1 was not leased again after lease 14 (expired)"),
    ],
)
def test_what_must_not_happen_to_a_lease_is_seen(more: Sequence[LeaseEvent], said: str) -> None:
    found = flaws(*GOOD, *more)
    assert any(said in flaw for flaw in found), found


def test_batch_that_a_checkpoint_cuts_in_two_is_seen() -> None:
    two_steps = make_trained(0, num_steps=2)
    assert flaws(started(), granted(0), accepted(0), two_steps, started(1))[0] == "version 1 lies within the batch of version 0"


@pytest.mark.parametrize(
    ("epoch_sizes", "said"),
    [
        ((4, 6, 6), ""),
        ((6, 6, 6), "was leased when it was the turn of prompt"),
        ((4, 6, 4), "epoch 2 has 4 prompts, the one before it had 6"),
    ],
)
def test_data_that_grew_is_followed_from_the_epoch_that_had_more(epoch_sizes: tuple[int, ...], said: str) -> None:
    """The data had 4 prompts, and 6 from epoch 1 on; the grants tell `epoch_sizes`."""
    stream = PromptStream(NUM_PROMPTS, SEED)
    turns = [stream.next() for _ in range(2)]
    assert stream.grow(6) == 1
    turns += [stream.next() for _ in range(9)]
    grants = [
        msgspec.structs.replace(granted(index), prompt_id=prompt_id, epoch=epoch, epoch_size=epoch_sizes[epoch])
        for index, (prompt_id, epoch) in enumerate(turns)
    ]
    log = followed(started(), *grants, *(dropped(grant.lease_id, is_final=True) for grant in grants))
    found = check_prompts(log, SEED, [log.epoch_sizes[epoch] for epoch in sorted(log.epoch_sizes)], NOTHING_LOST)
    assert (found.violations == []) == (not said)
    assert said in "".join(found.violations)
    if not said:
        assert found.seen == "11 turns of 4, then 6 prompts"
    again = msgspec.structs.replace(grants[0], lease_id=99, epoch_size=5)
    log.take(again)
    assert any("lease 99: epoch 0 had" in flaw for flaw in log.prompt_flaws)


def test_group_that_later_ones_are_trained_before_is_seen() -> None:
    def leases(number: int, *, without: int = -1) -> list[LeaseEvent]:
        events: list[LeaseEvent] = [started()]
        for lease_id in range(number):
            events += [granted(lease_id), accepted(lease_id)]
            events += [] if lease_id == without else [trained(lease_id - (0 <= without < lease_id), lease_id)]
        return events

    passed_over = ["lease 2: its group was accepted and not trained, but those of later leases were"]
    assert flaws(*leases(12)) == []
    assert flaws(*leases(12, without=2)) == flaws(*leases(4, without=2)) == passed_over
    assert flaws(*leases(12, without=2), lost=Lost.of([accepted(2)])) == []
    assert flaws(*leases(12, without=2), dropped(2, is_final=True)) == []
    assert flaws(*leases(4, without=3)) == [], "its turn comes next"
    # A group that came late may be newer in the buffer than one of a later lease.
    assert flaws(started(), granted(0), granted(1), accepted(1), trained(0, 1), accepted(0)) == []
    assert flaws(started(), granted(0), granted(1), accepted(0), accepted(1), trained(0, 0), trained(1, 1), started(0)) == []


def test_passes_over_few_prompts_may_be_open_at_the_same_time() -> None:
    """A run with more open leases than prompts goes on: two leases wait in the buffer, and others are generated."""
    open_leases = [granted(lease_id) for lease_id in range(5 * NUM_PROMPTS)]
    assert flaws(started(), *open_leases, accepted(0), trained(0, 0), accepted(1), accepted(2)) == []


def test_what_was_destroyed_on_purpose_is_no_violation_and_nothing_else_is_excused() -> None:
    history = [started(), granted(0), granted(1), accepted(1), trained(0, 0), trained(1, 1)]
    assert flaws(*history) == ["lease 0: trained without having been accepted"]
    assert flaws(*history, lost=Lost.of([accepted(0)])) == []
    assert flaws(*history, lost=Lost.of([accepted(1)])) == ["lease 0: trained without having been accepted"]
    # The grant of the second prompt is gone, but a checkpoint remembered it.
    skipped = [started(), granted(0), granted(2)]
    assert flaws(*skipped) != []
    assert flaws(*skipped, lost=Lost.of([granted(1)])) == []
    assert flaws(started(), started(1), lost=Lost.of([trained(0)])) == []
    assert flaws(started(), started(1), granted(0), accepted(0), trained(1, 0), lost=Lost.of([trained(0)])) == []
    assert flaws(started(), started(1), started(2), lost=Lost.of([trained(0)])) != []


def test_log_whose_beginning_was_deleted_is_followed_from_where_it_begins() -> None:
    log = followed(accepted(7), trained(5, 7), granted(8), accepted(8), trained(6, 8), trained(7, 8), is_whole=False)
    assert log.lease_flaws == []
    assert log.training_flaws == ["lease 8: trained at version 7, but it had ended: trained"]


def test_sums_that_differ_from_the_learners_or_do_not_add_up_are_seen() -> None:
    log = followed(*GOOD)
    said = LedgerSums(leased=8, trained=4, dropped={"stale": 1}, expired=1, in_flight=2)

    def violations(**changes: Any) -> list[str]:
        reported = msgspec.structs.replace(said, **changes)
        return check_conservation(log, reported, is_whole=True, lost=NOTHING_LOST).violations

    assert violations() == []
    assert violations(leased=9, expired=2) == [
        "leased: the log has 8, the learner said 9",
        "expired: the log has 1, the learner said 2",
    ]
    assert "do not add up" in violations(trained=5)[-1]
    assert violations(dropped={}, in_flight=3) != []


def test_canary_that_differs_or_is_no_number_is_seen() -> None:
    def violations(*measured: tuple[float | None, float | None], tolerance: float | None = None) -> list[str]:
        rows = [CanaryRow(actor="a", policy_version=1, max_abs_diff=diff, excess=excess) for diff, excess in measured]
        return check_canaries(rows, [tolerance]).violations

    assert violations((0.9, 0.3), (0.1, 1.0)) == []
    assert violations((0.4, 1.5)) == ["a at version 1: 0.4, 1.5 times the limits"]
    assert violations((None, None)) == ["a at version 1: None"]
    assert violations((0.4, 1.5), (0.6, 0.1), tolerance=0.5) == ["a at version 1: 0.6, 0.1 times the limits"]


def test_measured_limits_count_only_where_they_were_in_force() -> None:
    rows = [CanaryRow(actor="a", policy_version=1, max_abs_diff=0.4, excess=excess) for excess in (0.9, 1.1)]
    beyond = "a at version 1: 0.4, 1.1 times the limits"
    assert check_canaries(rows, [None]).violations == [beyond]
    assert check_canaries(rows, [1e-9, None]).violations == [beyond]
    assert check_canaries(rows, [0.4]).violations == []
    assert len(check_canaries(rows, [1e-9]).violations) == 2, "no measured limits were in force"


def test_canary_is_held_to_the_largest_tolerance_that_was_in_force(tmp_path: Path) -> None:
    def changed(after: str) -> EventRow:
        return EventRow(event="setting_changed", detail="", setting="weights.canary_tolerance", after=after)

    with MetricsWriter(tmp_path) as metrics:
        for row in (changed("0.01"), changed("1e-12"), changed("none")):
            metrics.write(row)
        metrics.write(CanaryRow(actor="a", policy_version=1, max_abs_diff=0.009))
        metrics.write(CanaryRow(actor="a", policy_version=2, max_abs_diff=0.011))
        metrics.write(CanaryRow(actor="a", policy_version=3, max_abs_diff=0.009, excess=1.1))
        metrics.write(CanaryRow(actor="a", policy_version=4, max_abs_diff=0.011, excess=0.9))
    checks = audit(tmp_path, load(None, ['model.dtype="float32"']))
    (canaries,) = (check for check in checks if check.claim == "actors sampled with the weights they said")
    assert canaries.violations == ["a at version 2: 0.011"]


def test_checkpoint_that_is_half_written_or_damaged_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000010"
    partial = checkpoints.partial_folder(folder)
    partial.mkdir()
    (partial / "weights").write_text("0123456789")
    assert check_checkpoints(tmp_path, has_ended=True).violations == ["step-00000010.partial is left over"]
    checkpoints.publish(folder)
    assert check_checkpoints(tmp_path, has_ended=True) == ("checkpoints are whole", [], "step-00000010")
    (folder / "weights").write_text("0123456780")
    (violation,) = check_checkpoints(tmp_path, has_ended=True).violations
    assert violation.startswith("step-00000010: weights has other content than was written")
    checkpoints.set_aside(folder)
    assert check_checkpoints(tmp_path, has_ended=True) == (
        "checkpoints are whole",
        [],
        "step-00000010.damaged was set aside",
    )


def test_checkpoint_that_is_being_written_is_no_violation_until_the_run_has_ended(tmp_path: Path) -> None:
    partial = checkpoints.partial_folder(checkpoints.checkpoint_folder(tmp_path / "checkpoints", 10))
    partial.mkdir(parents=True)
    config = load(None, [])
    check = find(audit(tmp_path, config), "checkpoints are whole")
    assert (check.violations, check.seen) == ([], "step-00000010.partial is unfinished")
    rows(tmp_path, final_row(2, LedgerSums(leased=0, trained=0, dropped={}, expired=0, in_flight=0)))
    assert find(audit(tmp_path, config), "checkpoints are whole").violations == ["step-00000010.partial is left over"]


def test_checkpoint_that_is_pruned_while_it_is_read_is_no_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (10, 20, 30):
        folder = checkpoints.checkpoint_folder(tmp_path, version)
        partial = checkpoints.partial_folder(folder)
        partial.mkdir()
        (partial / "weights").write_text("0123456789")
        checkpoints.publish(folder)
    describe = checkpoints._describe

    def prune_first(path: Path) -> checkpoints.FileEntry:
        checkpoints.prune(tmp_path, keep=1)
        return describe(path)

    monkeypatch.setattr(checkpoints, "_describe", prune_first)
    assert check_checkpoints(tmp_path, has_ended=False) == ("checkpoints are whole", [], "step-00000030")


def rows(folder: Path, *written: Row) -> Path:
    with MetricsWriter(folder) as metrics:
        for row in written:
            metrics.write(row)
    return folder


def final_row(policy_version: int, ledger: LedgerSums) -> FinalRow:
    return FinalRow(policy_version=policy_version, wall_s=1.0, ledger=ledger, outcome="finished", detail="")


def test_run_is_audited_from_its_folder(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1"}\n' * NUM_PROMPTS)
    run = write_run(tmp_path / "run", data, GOOD)
    checks = audited(run)
    assert [(check.claim, check.violations) for check in checks if check.violations] == []
    assert [check.seen for check in checks[:4]] == [
        "21 records",
        "8 leases",
        "2 batches kept, 1 undone by 1 restarts",
        "5 groups",
    ]
    assert "leased 8, trained 4, dropped 1, expired 1, in_flight 2" in find(checks, "leased =").seen
    broken = write_run(tmp_path / "broken", data, [*GOOD, trained(2, 10)])
    assert find(audited(broken), "no group is trained twice").violations == [
        "lease 10: trained at version 2, but it had ended: trained"
    ]


def test_log_that_is_gone_is_a_violation_unless_the_run_kept_none(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n' * NUM_PROMPTS)
    run = write_run(tmp_path / "run", tmp_path / "train.jsonl", GOOD)
    shutil.rmtree(run / "log")
    assert find(audited(run), "the rollout log").violations == [f"{run / 'log'} does not exist"]
    config = run / "config.toml"
    config.write_text(config.read_text().replace("[log]\nenabled = true", "[log]\nenabled = false"))
    assert not any(check.violations for check in audited(run))


def test_sizes_of_epochs_are_the_logs_and_not_those_of_the_data_as_it_is_now(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1"}\n' * 6)
    stream = PromptStream(NUM_PROMPTS, SEED)
    turns = [stream.next() for _ in range(3)]
    stream.grow(6)
    turns += [stream.next() for _ in range(5)]
    events = [
        msgspec.structs.replace(
            granted(index), prompt_id=turn.prompt_id, epoch=turn.epoch, epoch_size=stream.size_of(turn.epoch)
        )
        for index, turn in enumerate(turns)
    ]
    check = find(audited(write_run(tmp_path / "run", data, [started(), *events])), "prompts keep to the seed's order")
    assert (check.violations, check.seen) == ([], "8 turns of 4, then 6 prompts")


def audited(run: Path) -> list[Check]:
    return audit(run, load(run / "config.toml"))


def find(checks: Sequence[Check], claim: str) -> Check:
    return next(check for check in checks if check.claim.startswith(claim))


def write_run(folder: Path, data: Path, events: Sequence[LeaseEvent]) -> Path:
    rows(folder, final_row(2, LedgerSums(leased=8, trained=4, dropped={"stale": 1}, expired=1, in_flight=2)))
    config = Config(run=RunSection(dir=str(folder), seed=SEED), data=DataSection(train_data=str(data)))
    (folder / "config.toml").write_text(resolved_toml(config))
    log = RolloutLog(folder / "log", run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 30, min_free_bytes=0)
    arrays = (np.array([1, 2], dtype=np.int32), np.array([-0.5, -1.0], dtype=np.float32))
    for event in events:
        log.append(event, *(arrays if isinstance(event, Accepted) else ()))
    log.close()
    return folder


def test_damaged_log_and_impossible_groups_are_seen(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1"}\n' * NUM_PROMPTS)
    run = write_run(tmp_path / "run", data, GOOD)
    log = RolloutLog(run / "log", run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 30, min_free_bytes=0)
    log.append(accepted(14), np.array([1, 2], dtype=np.int32), np.array([0.5, -1.0], dtype=np.float32))
    log.close()
    assert find(audited(run), "accepted groups").violations == ["lease 14: impossible log-probs"]


def damage(run: Path, lease_id: int, kind: type[Granted | Expired | Accepted]) -> None:
    """Flip a bit in the record of this event."""
    for record in read_log(run / "log"):
        if isinstance(record.event, kind) and record.event.lease_id == lease_id:
            path = run / "log" / f"{record.position.segment:08d}.log"
            content = bytearray(path.read_bytes())
            content[record.position.offset + 20] ^= 1
            path.write_bytes(content)
            return
    raise AssertionError(f"no {kind.__name__} of lease {lease_id}")


@pytest.mark.parametrize(("lease_id", "kind"), [(1, Accepted), (2, Granted), (2, Expired), (10, Granted)])
def test_damage_that_a_learner_passed_over_is_told_and_is_no_violation(
    tmp_path: Path, lease_id: int, kind: type[Granted | Expired | Accepted]
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1"}\n' * NUM_PROMPTS)
    run = write_run(tmp_path / "run", data, GOOD)
    damage(run, lease_id, kind)
    checks = audited(run)
    readable = find(checks, "the rollout log")
    assert "00000001.log: bytes" in readable.seen
    assert [check.claim for check in checks if check.violations] == []


def test_damage_that_no_learner_has_seen_is_a_violation_that_says_what_to_do(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1"}\n' * NUM_PROMPTS)
    run = write_run(tmp_path / "run", data, GOOD)
    damage(run, 13, Granted)
    checks = audited(run)
    (violation,) = find(checks, "the rollout log").violations
    assert violation.startswith("00000001.log: bytes")
    assert violation.endswith("resume the run to go on without it")
    assert [check.claim for check in checks if check.violations] == ["the rollout log is readable to its end"]


def test_restart_that_the_log_lost_is_inferred_from_the_version_trained_next() -> None:
    log = followed(started(), granted(0), granted(1), accepted(0), accepted(1), trained(0, 0), trained(1, 1))
    log.lose()
    for event in (trained(1, 1), granted(2), accepted(2), trained(2, 2)):
        log.take(event)
    assert (log.lease_flaws, log.training_flaws, log.num_undone) == ([], [], 1)
    log.take(trained(3, 2))
    assert log.training_flaws == ["lease 2: trained at version 3, but it had ended: trained"]
