"""The quick start's folder appears whole, is the same wherever it is made, and survives being made twice at once."""

import errno
import multiprocessing
import random
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from safetensors import SafetensorError

from offbeat.common.errors import SettingError
from offbeat.common.settings.loading import load
from offbeat.deploy.local.quickstart.prepared import RECIPES, Recipe, ensure, expand, prepared_folder
from offbeat.deploy.local.quickstart.tiny_tasks import Calculator, Reversal, answers

SMALL = Recipe(Reversal(), warm_start_steps=2, warm_start_rows=4, num_train=20, num_eval=5)


def read_rows(path: Path) -> list[dict[str, str]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "folder"
    assert ensure(folder, SMALL)
    return folder


def test_rows_ask_for_the_reversal_and_none_is_in_both_files(made: Path) -> None:
    train, held_out = read_rows(made / "train.jsonl"), read_rows(made / "eval.jsonl")
    assert (len(train), len(held_out)) == (20, 5)
    for row in train + held_out:
        assert len(set(row["prompt"])) == 6
        assert row["prompt"] == row["answer"][::-1] + ">"
    assert len({row["prompt"] for row in train + held_out}) == 25


def test_answers_are_the_reversal_the_copy_and_two_rotations() -> None:
    assert answers("12345") == ("54321", "12345", "23451", "51234")


def test_folder_that_is_there_is_left_alone(made: Path) -> None:
    before = (made / "model" / "model.safetensors").stat().st_mtime_ns
    assert not ensure(made, SMALL)
    assert (made / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_same_recipe_makes_the_same_bytes(made: Path, tmp_path: Path) -> None:
    ensure(tmp_path / "again", SMALL)
    files = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*") if path.is_file())
    for file in files:
        assert (made / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file


def test_two_processes_at_once_leave_one_whole_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=ensure, args=(tmp_path / "folder", SMALL)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "folder.lock"]
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["eval.jsonl", "model", "train.jsonl"]


def test_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("offbeat.deploy.local.quickstart.prepared.warm_start", fail)
    with pytest.raises(OSError, match="disk full"):
        ensure(tmp_path / "folder", SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.lock"]


def test_folder_lies_in_the_cache_and_depends_on_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prepared_folder(RECIPES[0]).parent == tmp_path / "offbeat"
    assert prepared_folder(RECIPES[0]) != prepared_folder(SMALL)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert prepared_folder(RECIPES[0]).parent == tmp_path / "home" / ".cache" / "offbeat"


def test_placeholder_is_replaced_by_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = prepared_folder(RECIPES[0])
    folder.mkdir(parents=True)
    config = expand(load(None, ["model.path={quickstart}/model", "data.train_data={quickstart}/train.jsonl"]))
    assert config.model.path == f"{folder}/model"
    assert config.data.train_data == f"{folder}/train.jsonl"
    assert config.data.eval_data == ""


def test_config_without_the_placeholder_makes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = load(None, ["model.path=/models/mine"])
    assert expand(config) == config
    assert list(tmp_path.iterdir()) == []


def test_shown_calculations_are_right_in_a_quarter_and_read_by_the_parser_of_their_form() -> None:
    """Each token is one of the alphabet, and what the model calls is JSON."""
    calculator, generator = Calculator(), random.Random(0)
    num_right = 0
    for _ in range(400):
        tokens, mask = calculator.shown(generator)
        assert len(tokens) == len(mask) and set(tokens) <= {*calculator.alphabet, "$"}
        prompt, _, played = "".join(tokens).partition("=")
        call = re.match(r"<tool_call>(.*)</tool_call>[$](\d+)>(\d+)[$] *$", played)
        if call is None:
            assert re.match(r"\d+[$] *$", played)
            continue
        name, arguments = msgspec.json.decode(call[1]).values()
        result = arguments["a"] + arguments["b"] if name == "add" else arguments["a"] * arguments["b"]
        assert call[2] == str(result)
        num_right += eval(prompt) == int(call[3])
    assert 70 <= num_right <= 130


def test_cache_that_cannot_be_written_is_named_with_its_variable(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(SettingError, match=r"XDG_CACHE_HOME = .*cache\": .*{quickstart} cannot be made in .*Not a directory"):
        ensure(tmp_path / "cache/offbeat/quickstart-1", SMALL)


@pytest.mark.parametrize(
    "error", [OSError(errno.EDQUOT, "Disk quota exceeded"), SafetensorError("I/O error: Disk quota exceeded (os error 122)")]
)
def test_cache_that_is_full_is_named_with_its_variable(tmp_path: Path, error: Exception) -> None:
    class TooLarge:
        name, what = "large", "a large model"

        def make(self, folder: Path, say: Callable[[str], None]) -> None:
            (folder / "half").touch()
            raise error

    with pytest.raises(SettingError, match=r"XDG_CACHE_HOME = .*a large model cannot be made in .*Disk quota exceeded"):
        ensure(tmp_path / "offbeat/large-1", TooLarge())  # pyright: ignore[reportArgumentType]
    assert [path.name for path in (tmp_path / "offbeat").iterdir()] == ["large-1.lock"]


def test_what_a_killed_process_left_is_deleted_by_the_next_that_makes_the_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.partial/half").mkdir(parents=True)
    assert ensure(tmp_path / "folder", SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "folder.lock"]
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["eval.jsonl", "model", "train.jsonl"]


def test_wait_for_the_folder_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("offbeat.common.records.logs.STILL_S", 0.02)
    caplog.set_level("INFO")
    ensure(tmp_path / "folder", SMALL)
    first, *later = [text for text in caplog.messages if "making the model and data" in text]
    assert first.startswith("making the model and data of {") and first.endswith(" ...")
    assert any(f" of {SMALL.warm_start_steps}" in text and ", step " in text for text in later)
