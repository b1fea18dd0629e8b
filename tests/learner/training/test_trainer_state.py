"""Checkpoints of the trainer hold data only, and cost nothing but themselves where the disk is full."""

import math
import resource
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offbeat.common.settings.learning_sections import AdvantageSection, CriticSection, LoraSection
from offbeat.learner.training import checkpoints
from offbeat.learner.training.trainer_state import WEIGHTS_FILE, read_tree, write_tree
from tests.learner.training.test_trainer import running, weights_of
from tests.learner.training.trainer_cases import make_config, make_groups

pytestmark = pytest.mark.slow


def test_values_around_tensors_come_back(tmp_path: Path) -> None:
    tree = {
        "state": {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.arange(3)}},
        "groups": [{"lr": 0.5, "betas": [0.9, None]}],
    }
    write_tree(tmp_path / "rank-0", tree)
    loaded = read_tree(tmp_path / "rank-0")
    assert loaded["groups"] == tree["groups"]
    assert loaded["state"][0]["step"] == 3.0
    assert loaded["state"][1]["step"].tolist() == [0, 1, 2]


def test_checkpoint_holds_data_only_and_whole_weights(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000000"
    with running(make_config(tiny_model, zero_stage=3)) as trainer:
        trainer.train_batch(make_groups(3))
        trainer.save_checkpoint(folder, b"")
        expected = weights_of(trainer)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".msgpack", ".json", ".bin"}
    weights = load_file(folder / WEIGHTS_FILE)
    assert all(torch.equal(weights[f"policy.{name}"], weight) for name, weight in expected.items())
    assert checkpoints.find_damage(folder) is None


def test_checkpoint_written_without_a_gpu_is_loaded_where_there_is_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step-00000001"
    with running(make_config(tiny_model)) as trainer:
        trainer.train_batch(make_groups(3))
        trainer.save_checkpoint(folder, b"extra")
    with running(make_config(tiny_model)) as trainer:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert trainer.load_checkpoint(folder) == b"extra"
        assert trainer.policy_version == 1


def test_checkpoint_that_outgrows_the_disk_leaves_nothing_and_training_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000000"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with running(make_config(tiny_model)) as trainer:
        trainer.train_batch(make_groups(3, seed=0))
        for num_bytes in (10, 10_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
            try:
                with pytest.raises(checkpoints.CheckpointFailedError, match="rank 0: File too large"):
                    trainer.save_checkpoint(folder, b"extra")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert list(tmp_path.iterdir()) == []
        trainer.train_batch(make_groups(3, seed=1))
        trainer.save_checkpoint(folder, b"extra")
        assert checkpoints.find_damage(folder) is None


def test_checkpoint_waits_for_descriptors_that_strangers_have_taken(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000000"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running(make_config(tiny_model)) as trainer:
        trainer.train_batch(make_groups(3))
        later = threading.Timer(0.2, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
        later.start()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        trainer.save_checkpoint(folder, b"extra")
        later.join()
    assert checkpoints.find_damage(folder) is None
    assert checkpoints.read_extra(folder) == b"extra"


def test_model_replaces_the_older_one_whole_or_not_at_all(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with running(make_config(tiny_model)) as trainer:
        trainer.save_model(folder)
        first = {path.name: path.read_bytes() for path in folder.iterdir()}
        trainer.train_batch(make_groups(3))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            with pytest.raises(checkpoints.CheckpointFailedError, match="rank 0: File too large"):
                trainer.save_model(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
        trainer.save_model(folder)
    second = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert second.keys() == first.keys()
    assert second["model.safetensors"] != first["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_model_keeps_generation_settings_that_transformers_reads_but_does_not_write(tiny_model: Path, tmp_path: Path) -> None:
    start = shutil.copytree(tiny_model, tmp_path / "start")
    settings = '{"max_length": 4096, "pad_token_id": 0, "eos_token_id": 2, "temperature": 0.9, "top_p": 0.6}'
    (start / "generation_config.json").write_text(settings)
    with running(make_config(start)) as trainer:
        trainer.save_model(tmp_path / "model")
    assert (tmp_path / "model" / "generation_config.json").read_text() == settings


def test_model_without_the_files_that_are_copied_into_it_is_not_written_and_the_error_names_their_folder(
    tiny_model: Path, tmp_path: Path
) -> None:
    start = shutil.copytree(tiny_model, tmp_path / "start")
    with running(make_config(start)) as trainer:
        shutil.rmtree(start)
        with pytest.raises(checkpoints.CheckpointFailedError, match=f"rank 0: OSError: .*{start}"):
            trainer.save_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["all weights", "adapter", "own critic"])
def test_checkpoint_takes_no_more_than_its_trainer_says_and_frozen_weights_count_once(
    case: str, tiny_model: Path, tmp_path: Path
) -> None:
    lora = LoraSection(rank=1, target_modules=("q_proj",)) if case == "adapter" else None
    advantage, critic = (
        (AdvantageSection(baseline="critic"), CriticSection(trunk="own")) if case == "own critic" else (None, None)
    )
    with running(make_config(tiny_model, lora=lora, advantage=advantage, critic=critic)) as trainer:
        trainer.train_batch(make_groups(3))
        trainer.save_checkpoint(tmp_path / "step-00000001", b"")
        most, num_parameters = trainer.checkpoint_bytes(), sum(math.prod(spec.shape) for spec in trainer.layout())
    tensors = [tensor for file in tmp_path.rglob("*.safetensors") for tensor in load_file(file).values()]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.is_floating_point())
    assert num_bytes <= most
    # In float32: 4 bytes of each frozen weight, 16 of each trained one; a critic's value head has a few more.
    expected = {"all weights": 16.0, "adapter": 4.0, "own critic": 32.0}[case]
    assert most / num_parameters == pytest.approx(expected, rel=0.05)
