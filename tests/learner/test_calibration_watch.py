"""A run warns when its hardware or software differs from that of its noise floor."""

from typing import Any, cast

import msgspec

from offbeat.common.rows import row_fields
from offbeat.learner.calibration_watch import CalibrationWatch
from offbeat.learner.diagnostics.calibration import Calibration, EngineNumerics, LearnerNumerics
from offbeat.protocols.engine_info import EngineInfo, ModelHashes
from offbeat.protocols.messages import Hello

LEARNER = LearnerNumerics(
    model=ModelHashes("c", "t", ""),
    dtype="bfloat16",
    fp32_head=True,
    lora_rank=0,
    temperature=1.0,
    device="H100",
    torch="2.9",
    transformers="5.0",
    engine_options={},
)


class FakeCalibration:
    learner = LEARNER
    engine = EngineNumerics("vllm", "0.15", "bfloat16", "H100")


class FakeHello:
    actor = "a"

    def __init__(self, device: str) -> None:
        self.engine = EngineInfo(
            name="vllm", version="0.15", dtype="bfloat16", device=device, max_model_len=64, hashes=LEARNER.model
        )


def watch(is_calibrated: bool = True) -> tuple[CalibrationWatch, list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    calibration = cast(Calibration, FakeCalibration()) if is_calibrated else None
    return CalibrationWatch(calibration, lambda row: rows.append(row_fields(row))), rows


def hello(device: str) -> Hello:
    return cast(Hello, FakeHello(device))


def test_actor_on_another_device_is_told_of_by_name() -> None:
    calibrated, rows = watch()
    calibrated.joined(hello("H100"))
    calibrated.joined(hello("cpu"))
    engine, other_engine, event = rows
    assert (engine["kind"], engine["actor"], engine["engine"]["device"]) == ("engine", "a", "H100")
    assert (other_engine["kind"], other_engine["engine"]["device"]) == ("engine", "cpu")
    assert (event["event"], event["actor"]) == ("calibration_mismatch", "a")
    assert event["detail"].startswith("a is not what loss.noise_floor was measured on")
    assert "device was H100, and is cpu" in event["detail"]


def test_learner_with_another_torch_is_told_of() -> None:
    calibrated, rows = watch()
    calibrated.check_learner(LEARNER)
    assert rows == []
    calibrated.check_learner(msgspec.structs.replace(LEARNER, torch="2.10"))
    (event,) = rows
    assert event["detail"].startswith("the learner is not what loss.noise_floor was measured on")
    assert "torch was 2.9, and is 2.10" in event["detail"]
    assert "actor" not in event


def test_run_without_a_calibration_records_engines_and_warns_of_nothing() -> None:
    plain, rows = watch(is_calibrated=False)
    plain.joined(hello("cpu"))
    plain.check_learner(LEARNER)
    assert [row["kind"] for row in rows] == ["engine"]
