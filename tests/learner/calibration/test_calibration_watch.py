"""A run warns when its hardware or software differs from that of its noise floor."""

from typing import Any, cast

import msgspec

from offbeat.common.records.rows import StepRow, row_fields
from offbeat.learner.calibration.calibration import BandCheck, Calibration, EngineNumerics, LearnerNumerics
from offbeat.learner.calibration.watch import CalibrationWatch
from offbeat.learner.objectives.bands import ClipBand
from offbeat.protocols.message_parts import EngineInfo, ModelHashes
from offbeat.protocols.messages import Hello
from tests.learner.calibration.test_calibration import make_calibration

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
    processor="",
)


class FakeCalibration:
    learner = LEARNER
    engine = EngineNumerics("vllm", "0.15", "bfloat16", "H100", quantization="", processor="")


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


def first_step(predicted: float, clipped: float) -> StepRow:
    numbers = {"clip_noise": predicted, "clip_fraction": clipped, "count": 256}
    return StepRow(policy_version=1, metrics={f"by_lag/0/{name}": value for name, value in numbers.items()})


def events_of(calibration: Calibration, step: StepRow) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    CalibrationWatch(calibration, lambda row: rows.append(row_fields(row))).check_first_step(step)
    return rows


def test_first_step_that_clips_more_or_less_than_sampling_explains_is_told_with_both_shares() -> None:
    band = ClipBand(3e-4, 4e-4, is_sequence_ratio=True)
    checks = [BandCheck("own", band, 0.3, 0.3, 0.0229, 0.4, 0.4, 0.4, 0.4)]
    whole = make_calibration()
    floor = msgspec.structs.replace(whole.floor, num_completions=1024)
    calibration = msgspec.structs.replace(whole, floor=floor, num_groups=128, checks=checks)
    # 0.3 * 0.7 / 0.0229^2 = 400 of the 1,024 completions are independent, and 100 of a step's 256: the error of a difference is
    # sqrt(0.21 (1/400 + 1/100)) = 0.0512, so 2.58 * 0.0512 + 0.01 = 0.142 are allowed.
    assert round(calibration.num_independent) == 400
    assert events_of(calibration, first_step(0.3, 0.3 + 0.141)) == events_of(calibration, first_step(0.3, 0.3 - 0.141)) == []
    for clipped in (0.3 + 0.144, 0.3 - 0.144):
        (event,) = events_of(calibration, first_step(0.3, clipped))
        assert (event["event"], event["policy_version"]) == ("clip_mispredicted", 1)
        for part in (
            "30.0% of the first step",
            f"{clipped:.1%} were clipped",
            "difference of 14.",
            "`offbeat calibrate` again",
        ):
            assert part in event["detail"]


def test_first_step_without_a_band_or_a_calibration_is_not_judged() -> None:
    assert events_of(make_calibration(), StepRow(policy_version=1, metrics={"by_lag/0/count": 256})) == []
    plain, rows = watch(is_calibrated=False)
    plain.check_first_step(first_step(0.3, 0.9))
    assert rows == []
