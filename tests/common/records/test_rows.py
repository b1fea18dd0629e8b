"""Rows keep the bytes of their lines, and a line that is old, damaged or newer costs no other row."""

import math
from typing import Any

import msgspec
import pytest

from offbeat.common.records.rows import (
    ROW_TYPES,
    ActorRow,
    EventRow,
    OtherRow,
    RoutingRow,
    Row,
    StepRow,
    decode_row,
    encode_row,
)
from tests.common.records.row_lines import row_from

# One line of each kind, as runs wrote them before rows were structs.
RECORDED = b"""\
{"kind":"event","time":1795315909.3756888,"event":"run_started","detail":"offbeat 0.1.0, torch 2.13.0+cpu"}
{"kind":"engine","time":1795315916.37,"actor":"actor-0","engine":{"name":"vllm","version":"0.32.0","dtype":"float32",\
"device":"cpu","max_model_len":32,"hashes":{"config":"bbb9","tokenizer":"69f4","chat_template":"e3b0"},"gpu":null,\
"quantization":"","takes_images":false,"has_weight_files":true,"processor":"AMD EPYC (avx2)"}}
{"kind":"event","time":1795315916.37,"event":"actor_joined","detail":"vllm 0.32.0 float32 on cpu","actor":"actor-0"}
{"kind":"event","time":8.5,"event":"lease_expired","detail":"actor_lost","actor":"actor-0","lease_id":3,"after_s":2.5}
{"kind":"event","time":8.5,"event":"bad_message","detail":"no frames","peer":"10.0.0.1"}
{"kind":"event","time":8.5,"event":"setting_changed","detail":"loss.clip_low = 0.1, was 0.2; by me","reason":"",\
"setting":"loss.clip_low","before":"0.2","after":"0.1","who":"me","at":8.25,"policy_version":4}
{"kind":"event","time":8.5,"event":"setting_kept","detail":"kept","setting":"loss.clip_low","value":"0.1"}
{"kind":"event","time":8.5,"event":"resumed","detail":"at policy version 4","num_reused":7}
{"kind":"actor","time":8.5,"actor":"actor-0","policy_version":-1,"num_generated_tokens":0,"num_groups_sent":0,\
"num_running_completions":0,"seconds":{"generate":0.0,"wait_leases":0.5}}
{"kind":"weights","time":8.5,"policy_version":0,"publish_s":0.013107742000102007,"num_members":1,"num_excluded":0}
{"kind":"pull","time":8.6,"actor":"actor-0","policy_version":0,"pull_s":0.25,"sent_bytes":1024,"full_bytes":65536}
{"kind":"commit","time":8.5,"actor":"actor-0","policy_version":0,"stall_s":0.020377336999899853}
{"kind":"canary","time":8.5,"actor":"actor-0","policy_version":0,"max_abs_diff":5.9604644775390625e-6,\
"mean_abs_diff":0.03125,"high_abs_diff":0.125,"excess":0.5}
{"kind":"canary","time":8.5,"actor":"actor-0","policy_version":1,"max_abs_diff":null}
{"kind":"group","time":8.5,"lease_id":9,"prompt_id":9,"actor":"actor-1","outcome":"trained","reason":"",\
"policy_version":0,"policy_lag":0,"lengths":[6,7],"rewards":[0.0,1.0],"generate_s":0.25,"num_segments":1,\
"taken_at":8.25}
{"kind":"sample","time":8.5,"policy_version":1,"lease_id":9,"prompt_id":9,"policy_lag":0,"reward":1.0,"above_mean":0.5,\
"finish_reason":"length","num_tokens":2,"prompt":"ab>","completion":"\\u001b[31m<b>"}
{"kind":"eval_sample","time":8.5,"policy_version":20,"prompt_id":3,"data_set":"math","reward":1.0,"finish_reason":"stop",\
"num_tokens":2,"prompt":"ab>","completion":"\\u001b[31m<b>"}
{"kind":"eval_sample","time":8.5,"policy_version":20,"prompt_id":3,"reward":1.0,"finish_reason":"stop","num_tokens":2,\
"prompt":"ab>","completion":"ba"}
{"kind":"step","time":8.5,"policy_version":1,"reward/mean":0.25,"reward/zero_variance_groups":7,"lag/max":0,\
"lag/counts":{"0":32},"by_lag/0/count":256,"loss/policy":null,"time/prepare_s":0.5,"staleness/bound":4}
{"kind":"eval","time":8.5,"policy_version":20,"reward":0.5,"length":6.25,"num_completions":64,"num_failed":0}
{"kind":"eval","time":8.5,"policy_version":40,"reward":null,"length":null,"num_completions":0,"num_failed":64}
{"kind":"routing","time":8.5,"policy_version":10,"routing/load_entropy":0.75,"routing/lag_3_4_overlap":0.5}
{"kind":"routing","time":8.5,"actor":"actor-0","policy_version":10,"routing/engine_overlap":1.0}
{"kind":"epoch","time":8.5,"epoch":0,"num_trained":31,"dropped":{"reward_error":[4]}}
{"kind":"final","time":8.5,"policy_version":100,"wall_s":48.5,"ledger":{"leased":5,"trained":3,"dropped":{"stale":1},\
"expired":1,"in_flight":0},"outcome":"finished","detail":""}
"""


@pytest.mark.parametrize("line", RECORDED.splitlines(keepends=True))
def test_recorded_line_is_read_and_written_as_it_was(line: bytes) -> None:
    row = decode_row(line)
    assert row is not None and not isinstance(row, OtherRow)
    assert encode_row(row) == line


def test_every_kind_has_a_recorded_line() -> None:
    assert {type(decode_row(line)) for line in RECORDED.splitlines()} == set(ROW_TYPES)


def test_number_that_is_not_finite_is_written_as_null_and_read_as_none() -> None:
    row = decode_row(
        encode_row(StepRow(time=1.0, policy_version=1, metrics={"loss/policy": math.nan, "reward/mean": math.inf}))
    )
    assert isinstance(row, StepRow)
    assert dict(row.metrics) == {"loss/policy": None, "reward/mean": None}
    assert row.number("loss/policy") is None


def test_actor_without_weights_has_no_version_and_minus_one_stands_in_the_file() -> None:
    numbers = {"num_generated_tokens": 0, "num_groups_sent": 0, "num_running_completions": 0, "seconds": {}}
    row = row_from({"kind": "actor", "time": 1.0, "actor": "a", "policy_version": -1, **numbers})
    assert isinstance(row, ActorRow)
    assert row.policy_version is None
    assert b'"policy_version":-1,' in encode_row(row)


def test_value_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError):
        encode_row(StepRow(time=1.0, policy_version=1, metrics={"loss/policy": object()}))  # pyright: ignore[reportArgumentType]


def test_field_of_a_newer_version_is_left_out() -> None:
    row = row_from({"kind": "commit", "time": 1.0, "actor": "a", "policy_version": 1, "stall_s": 0.5, "color": "blue"})
    assert b"color" not in encode_row(row)


def step_fields(**changes: Any) -> dict[str, Any]:
    return {"kind": "step", "time": 2.5, "policy_version": 3, "reward/mean": 0.5, **changes}


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "weather", "time": 2.5, "wind": 3},
        {"kind": ["step"], "time": 2.5},
        {"time": 2.5},
        {"kind": "commit", "time": 2.5, "actor": "a", "policy_version": 1},
        {"kind": "commit", "time": 2.5, "actor": "a", "policy_version": 1, "stall_s": "long"},
        step_fields(policy_version=None),
    ],
)
def test_row_of_unknown_kind_or_without_what_its_kind_needs_tells_its_time_alone(fields: dict[str, Any]) -> None:
    row = decode_row(msgspec.json.encode(fields))
    assert isinstance(row, OtherRow)
    assert row.time == 2.5


def test_time_that_is_no_number_is_nan() -> None:
    row = decode_row(b'{"kind":"weather","time":true}')
    assert isinstance(row, OtherRow) and math.isnan(row.time)


def test_damaged_metric_costs_its_step_no_other() -> None:
    row = row_from(step_fields(**{"loss/policy": "x", "lag/counts": {"0": None}, "clip/fraction": [1], "lag/max": True}))
    assert isinstance(row, StepRow)
    assert dict(row.metrics) == {"reward/mean": 0.5}


def test_groups_by_lag_are_numbers() -> None:
    row = row_from(step_fields(**{"lag/counts": {"0": 3, "12": 1, "x": 4}}))
    assert isinstance(row, StepRow)
    assert row.groups_by_lag == {0: 3, 12: 1}
    assert StepRow(policy_version=1, metrics={}).groups_by_lag == {}


def test_metric_that_no_step_has_is_an_error_and_one_that_this_step_lacks_is_none() -> None:
    row = StepRow(policy_version=1, metrics={"reward/mean": 0.5, "by_lag/3-4/count": 2})
    assert row.number("clip/fraction") is None
    assert row.number("by_lag/3-4/count") == 2
    with pytest.raises(KeyError, match="rewards/mean"):
        row.number("rewards/mean")
    with pytest.raises(KeyError):
        row.measured("clip/fraction")


def test_unstamped_row_has_no_time_on_its_line() -> None:
    assert encode_row(EventRow(event="e", detail="")) == b'{"kind":"event","event":"e","detail":""}\n'


@pytest.mark.parametrize("row", [EventRow(event="e", detail=""), RoutingRow(policy_version=1, metrics={})])
def test_absent_field_is_not_written(row: Row) -> None:
    assert b"actor" not in encode_row(row)


def test_integer_written_for_a_number_stays_an_integer() -> None:
    row = row_from({"kind": "step", "time": 1, "policy_version": 2, "lag/max": 3})
    assert isinstance(row, StepRow)
    assert encode_row(row).endswith(b'"lag/max":3}\n')
    assert isinstance(
        row_from(
            {"kind": "actor", "time": 1, "actor": "a", "policy_version": 0, "seconds": {"generate": 1}}
            | {"num_generated_tokens": 1, "num_groups_sent": 1, "num_running_completions": 1}
        ),
        ActorRow,
    )
