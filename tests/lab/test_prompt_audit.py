"""The audit sees a group that was accepted for, or trained on, another prompt than was leased."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from offbeat.common.settings.config import Config, DataSection
from offbeat.lab.audit import NOTHING_LOST, audit_log
from offbeat.lab.prompt_order import PromptAudit
from offbeat.learner.leases.events import LeaseEvent
from offbeat.learner.leases.rollout_log import RolloutLog
from tests.lab.test_audit import accepted, granted, trained

GOOD: list[LeaseEvent] = [
    replace(granted(0), prompt_hash=10),
    replace(granted(1), prompt_hash=11),
    replace(accepted(0), prompt_hash=10),
    replace(accepted(1), prompt_hash=11),
    replace(trained(0, 0, 1), prompt_hashes=(10, 11)),
]


def audited(*events: LeaseEvent) -> PromptAudit:
    prompts = PromptAudit()
    for event in events:
        prompts.take(event)
    return prompts


def test_good_history_has_no_flaw_and_its_groups_are_compared() -> None:
    prompts = audited(*GOOD)
    assert (prompts.flaws, prompts.num_compared, prompts.num_trained) == ([], 2, 2)


@pytest.mark.parametrize(
    ("event", "flaw"),
    [
        (
            replace(trained(0, 1, 0), prompt_hashes=(10, 10)),
            "lease 1: trained at version 0 on another prompt than was leased (hash 000000000000000a, not 000000000000000b)",
        ),
        (
            replace(accepted(1), prompt_hash=255),
            "lease 1: accepted for another prompt than was leased (hash 00000000000000ff, not 000000000000000b)",
        ),
    ],
)
def test_group_of_another_prompt_is_seen(event: LeaseEvent, flaw: str) -> None:
    assert audited(*GOOD[:4], event).flaws == [flaw]


def test_audit_of_a_log_has_the_claim(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 30, min_free_bytes=0)
    for event in (GOOD[0], replace(trained(0, 0), prompt_hashes=(99,))):
        log.append(event)
    log.close()
    config = Config(data=DataSection(train_data="absent.jsonl"))
    (check,) = [check for check in audit_log(tmp_path, config, None, NOTHING_LOST) if "prompt is the one" in check.claim]
    assert check.claim == "each trained group's prompt is the one that was leased"
    assert len(check.violations) == 1
    assert check.seen == "1 of 1 trained groups compared"
