"""A calibration is read back unchanged, refused when malformed, and lists what has changed since."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from offbeat.common.errors import SettingError
from offbeat.common.processes.process_table import processor_name
from offbeat.common.settings.config import ActorSection, Config, ModelSection, RolloutSection
from offbeat.common.settings.learning_sections import LoraSection, TrainSection
from offbeat.learner.calibration.calibration import (
    BandCheck,
    Calibration,
    EngineNumerics,
    changes,
    engine_numerics,
    learner_numerics,
    load_calibration,
    save_calibration,
)
from offbeat.learner.calibration.noise_floor import describe, fit
from offbeat.learner.objectives.bands import ClipBand
from offbeat.protocols.message_parts import EngineInfo, ModelHashes
from tests.learner.calibration.test_noise_floor import sample

HASHES = ModelHashes("c0", "t0", "x0")
ENGINE = EngineNumerics("vllm", "1.0", "float32", "cpu", quantization="", processor="")


def make_calibration(config: Config | None = None) -> Calibration:
    differences = sample(50)
    floor, band = fit(differences), ClipBand(1e-3, 2e-3, is_sequence_ratio=True)
    return Calibration(
        made_at="2026-01-01 00:00:00",
        learner=learner_numerics(config or Config(), HASHES, torch.device("cpu")),
        engine=ENGINE,
        num_groups=4,
        objective="gspo",
        anchor="behavior",
        floor=floor,
        summaries=describe(differences, floor),
        by_probability=[],
        checks=[BandCheck("own", band, 0.1, 0.11, 0.01, 0.2, 0.21, 0.05, 0.06)],
        recommended=band,
        positive=fit(sample(50, seed=1)),
        negative=fit(sample(50, seed=2)),
        sign_shares=(0.5, 0.5),
        bounds=(),
        length_quantiles=(5, 10, 20),
    )


def test_calibration_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    calibration = make_calibration(Config(actor=ActorSection(engine_options={"quantization": "fp8"})))
    assert load_calibration(str(save_calibration(calibration, tmp_path))) == calibration


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"made_at": 3}', b'{"made_at": "\xc3"}'])
def test_file_that_is_no_calibration_is_a_mistake_of_the_user_with_a_cure(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "calibration.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingError, match=r"loss\.noise_floor = .*offbeat calibrate"):
        load_calibration(str(file))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model": ModelSection(dtype="float32")}, "dtype was bfloat16, and is float32"),
        ({"train": TrainSection(fp32_head=True)}, "fp32_head was False, and is True"),
        ({"rollout": RolloutSection(temperature=0.5)}, "temperature was 1.0, and is 0.5"),
        ({"lora": LoraSection(rank=8)}, "lora_rank was 0, and is 8"),
        ({"actor": ActorSection(engine_options={"a": 1})}, "engine_options was {}, and is {'a': 1}"),
    ],
)
def test_setting_that_changes_the_learners_numerics_is_named(config: dict[str, Any], said: str) -> None:
    measured = make_calibration().learner
    assert measured.processor == processor_name("cpu") != ""
    assert changes(measured, learner_numerics(Config(), HASHES, torch.device("cpu"))) == []
    assert changes(measured, learner_numerics(Config(**config), HASHES, torch.device("cpu"))) == [said]


def test_another_model_or_engine_is_named() -> None:
    learner = make_calibration().learner
    other = msgspec.structs.replace(learner, model=ModelHashes("c1", "t0", "x0"), torch="0.1")
    assert changes(learner, other) == [
        "model was c0/t0/x0, and is c1/t0/x0",
        f"torch was {torch.__version__}, and is 0.1",
    ]
    processor = msgspec.structs.replace(learner, processor="Xeon (avx2 amx_bf16)")
    assert changes(processor, msgspec.structs.replace(learner, processor="EPYC (avx2)")) == [
        "processor was Xeon (avx2 amx_bf16), and is EPYC (avx2)"
    ]
    info = EngineInfo("vllm", "1.1", "float32", "cuda", 64, HASHES)
    assert changes(ENGINE, engine_numerics(info)) == ["version was 1.0, and is 1.1", "device was cpu, and is cuda"]
