"""A run's identity: what it covers, and which differences a resumed run may have."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from offbeat.common.errors import SettingError
from offbeat.common.models.folders import hash_weights
from offbeat.common.records.rows import EventRow
from offbeat.common.settings.config import Config, DataSection, ModelSection, RolloutSection
from offbeat.common.settings.learning_sections import LossSection, TrainSection
from offbeat.common.settings.loading import replace_settings, setting_names
from offbeat.common.settings.resume_rules import OUTCOMES, RULES
from offbeat.learner.dispatch.live_settings import CHANGEABLE
from offbeat.learner.leases.prompts import Prompt
from offbeat.learner.restart.run_identity import (
    Change,
    PromptHashes,
    RunIdentity,
    compare,
    describe_prompts,
    hash_prompts,
    make_identity,
    read_identity,
    read_prompt_hashes,
    report_changes,
    require_same_run,
    write_identity,
)
from offbeat.protocols.message_parts import ModelHashes

HASHES = ModelHashes(config="c", tokenizer="t", chat_template="j")
NO_PROMPTS = np.empty(0, np.uint64)


def prompts(*rows: str) -> list[Prompt]:
    return [Prompt(index, row, np.array([len(row), index], np.int32), row) for index, row in enumerate(rows)]


def numbers(*values: int) -> PromptHashes:
    return np.array(values, np.uint64)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    return Config(model=ModelSection(path=str(model)), data=DataSection(train_data="train.jsonl"))


def identity_of(config: Config, hashes: ModelHashes = HASHES, train: PromptHashes = NO_PROMPTS) -> RunIdentity:
    return make_identity(config, hashes, train, NO_PROMPTS)


def refusal(before: RunIdentity, after: RunIdentity, *hashes: PromptHashes) -> SettingError:
    with pytest.raises(SettingError) as caught:
        require_same_run(before, after, *(hashes or (NO_PROMPTS, NO_PROMPTS)))
    return caught.value


def test_every_setting_and_content_has_exactly_one_rule(config: Config, tmp_path: Path) -> None:
    names = [name for rule in RULES for name in rule.names]
    assert len(names) == len(set(names))
    settings = set(setting_names())
    assert settings == {name for name in names if ":" not in name}, (
        "add a new setting to a rule of common/settings/resume_rules.py"
    )
    (tmp_path / "floor").write_text("{}")
    full = replace(
        config,
        kl=replace(config.kl, reference=config.model.path),
        loss=LossSection(noise_floor=str(tmp_path / "floor"), function="json:dump", correction="json:dump"),
        advantage=replace(config.advantage, function="json:load"),
        evaluation=replace(config.evaluation, function="json:load"),
        data=replace(config.data, train_data="json:dumps", curriculum="json:dumps"),
        task=replace(config.task, reward="json:dumps", environment="json:dumps"),
        reward=replace(config.reward, length_penalty="json:loads"),
    )
    identity = make_identity(full, HASHES, numbers(1), numbers(2))
    assert set(identity.settings) == settings
    assert set(identity.contents) == {name for name in names if ":" in name}


def test_settings_that_may_change_during_the_run_may_change_at_its_resumption() -> None:
    assert {OUTCOMES[setting] for setting in CHANGEABLE} == {"recorded"}


def test_identity_is_read_as_it_was_written_and_none_where_there_is_none(config: Config, tmp_path: Path) -> None:
    train = hash_prompts(prompts("a", "b"))
    identity = identity_of(config, train=train)
    assert read_identity(tmp_path) is None
    assert read_prompt_hashes(tmp_path) is None
    write_identity(tmp_path, identity, train)
    assert read_identity(tmp_path) == identity
    read = read_prompt_hashes(tmp_path)
    assert read is not None
    assert read.tolist() == train.tolist()
    (tmp_path / "prompts.bin").write_bytes(bytes(16))
    assert read_prompt_hashes(tmp_path) is None
    (tmp_path / "identity.json").write_bytes(b"{")
    assert read_identity(tmp_path) is None


@pytest.mark.parametrize(
    ("changed", "setting", "said"),
    [
        ({"rollout": RolloutSection(temperature=0.5)}, "rollout.temperature", "0.5: the run was made with 1.0. Set rollout."),
        ({"loss": LossSection(objective="grpo")}, "loss.objective", 'the run was made with "gspo"'),
        ({"data": DataSection(train_data="train.jsonl", chat_template=True)}, "data.chat_template", "made with false"),
        ({"reward": msgspec.convert({"clip": 2.0}, type(Config().reward))}, "reward.clip", "2.0: the run was made with none"),
    ],
)
def test_other_sampling_objective_and_prompts_are_refused_with_both_values_and_the_cure(
    config: Config, changed: dict[str, Any], setting: str, said: str
) -> None:
    error = refusal(identity_of(config), identity_of(replace(config, **changed)))
    assert error.setting == setting
    assert said in str(error)
    assert "to resume, or begin a new run in another run.dir" in str(error)


@pytest.mark.parametrize(
    ("hashes", "said"),
    [
        (ModelHashes(config="x", tokenizer="t", chat_template="j"), "config: not as the run was made with (hash c, now x)"),
        (ModelHashes(config="c", tokenizer="x", chat_template="j"), "tokenizer: not as the run was made with (hash t, now x)"),
        (ModelHashes(config="c", tokenizer="t", chat_template="x"), "template: not as the run was made with (hash j, now x)"),
    ],
)
def test_other_model_files_are_refused(config: Config, hashes: ModelHashes, said: str) -> None:
    error = refusal(identity_of(config), identity_of(config, hashes))
    assert error.setting == "model.path"
    assert said in str(error)


def test_other_weights_are_refused_and_a_moved_model_is_recorded(config: Config, tmp_path: Path) -> None:
    before = identity_of(config)
    folder = Path(config.model.path)
    moved = folder.rename(tmp_path / "moved")
    elsewhere = replace(config, model=replace(config.model, path=str(moved)))
    changes = require_same_run(before, identity_of(elsewhere), NO_PROMPTS, NO_PROMPTS)
    assert changes == [Change("model.path", f'"{folder}"', f'"{moved}"')]
    weights = moved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    assert "weight files: not as the run was made with" in str(refusal(before, identity_of(elsewhere)))


def test_every_refused_difference_is_named_at_once(config: Config) -> None:
    other = replace(config, rollout=RolloutSection(temperature=0.5, group_size=4))
    assert "Also different: rollout.temperature (was 1.0, is 0.5)." in str(refusal(identity_of(config), identity_of(other)))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (numbers(1, 2, 3), numbers(3, 2, 1), "the 3 prompts are in another order"),
        (numbers(1, 2, 3), numbers(1, 9, 3), "1 of the first 3 differ, the first of them prompt 1 (counted from 0)"),
        (numbers(1, 2, 3), numbers(1, 2, 3, 4, 5), "2 prompts were added to the end of the 3"),
        (numbers(1, 2, 3), numbers(1, 2), "1 prompts were taken from the end of the 3"),
        (numbers(1, 2, 3), numbers(2, 3), "there were 3, and are 2; 2 of the first 2 differ, the first of them prompt 0"),
        (None, numbers(1, 2), "their hash differs, and there are 2 now"),
    ],
)
def test_changed_data_is_described(before: PromptHashes | None, after: PromptHashes, said: str) -> None:
    assert describe_prompts(before, after).startswith(said)


@pytest.mark.parametrize(
    "after",
    [
        prompts("b", "a"),
        prompts("a", "c"),
        prompts("a"),
        [prompts("a")[0], prompts("a", "b")[1]._replace(weight=2.0)],
        [prompts("a")[0], prompts("a", "b")[1]._replace(token_ids=np.array([7], np.int32))],
    ],
    ids=["order", "row", "number", "weight", "tokens"],
)
def test_other_prompts_are_refused(config: Config, after: list[Prompt]) -> None:
    before, now = hash_prompts(prompts("a", "b")), hash_prompts(after)
    error = refusal(identity_of(config, train=before), identity_of(config, train=now), before, now)
    assert error.setting == "data.train_data"
    assert "these are not the prompts that the run was made with" in str(error)


def test_prompts_behind_the_last_are_recorded_where_they_may_be_added(config: Config) -> None:
    before, now = hash_prompts(prompts("a", "b")), hash_prompts(prompts("a", "b", "c"))
    first, second = identity_of(config, train=before), identity_of(config, train=now)
    # The hashes of a folder whose data has grown already say nothing of an older checkpoint's.
    for known in (before, now, None):
        (change,) = require_same_run(first, second, known, now, may_append=True)
        assert (change.name, change.before[:9], change.after[:9]) == ("data.train_data: prompts", "2 prompts", "3 prompts")
        with pytest.raises(SettingError) as caught:
            require_same_run(first, second, known, now)
        assert "1 prompts were added to the end of the 2. Give the data as it was, or set data.appended_data=allow, to" in str(
            caught.value
        )


@pytest.mark.parametrize("after", [("a", "c", "b"), ("b", "a", "c"), ("a",), ("a", "c")])
def test_changed_moved_and_missing_prompts_are_refused_where_more_may_be_added(config: Config, after: tuple[str, ...]) -> None:
    before, now = hash_prompts(prompts("a", "b")), hash_prompts(prompts(*after))
    with pytest.raises(SettingError, match="these are not the prompts that the run was made with") as caught:
        require_same_run(identity_of(config, train=before), identity_of(config, train=now), before, now, may_append=True)
    assert "appended_data" not in str(caught.value)


def test_more_steps_more_actors_and_settings_of_set_are_recorded(config: Config) -> None:
    other = replace(
        config,
        train=TrainSection(num_steps=2000, learning_rate=1e-5),
        launch=replace(config.launch, num_actors=3),
        run=replace(config.run, resume=True),
        # As `offbeat train` does with port 0.
        hub=replace(config.hub, address="tcp://127.0.0.1:5701"),
    )
    rows: list[Any] = []
    changes = require_same_run(identity_of(config), identity_of(other), NO_PROMPTS, NO_PROMPTS)
    report_changes(changes, rows.append)
    assert rows == [
        EventRow(
            event="resumed_with_changes",
            detail=f"resumed with {setting} = {after}, was {before}",
            setting=setting,
            before=before,
            after=after,
            time=pytest.approx(float("nan"), nan_ok=True),  # pyright: ignore[reportArgumentType]
        )
        for setting, before, after in (
            ("train.num_steps", "1000", "2000"),
            ("train.learning_rate", "1e-06", "1e-05"),
            ("launch.num_actors", "1", "3"),
        )
    ]


def test_names_that_one_program_does_not_know_say_nothing(config: Config) -> None:
    new = identity_of(config)
    old = RunIdentity({"gone.setting": "1", "train.num_steps": "1000"}, {"gone content": "x"})
    assert compare(old, new) == []


def test_corrected_reward_is_recorded(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "__init__.py").write_text("raise SystemExit('it was executed')")
    source = tmp_path / "judge" / "rules.py"
    source.write_text("solved = 1")
    with_reward = replace(config, task=replace(config.task, reward="judge.rules:solved"))
    before = identity_of(with_reward)
    source.write_text("solved = 2")
    (change,) = require_same_run(before, identity_of(with_reward), NO_PROMPTS, NO_PROMPTS)
    assert change.name == "task.reward: source files"


def test_changed_module_that_a_reward_imports_is_recorded_by_its_name(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text("from parsing import answer\ndef solved(): ...")
    helper = tmp_path / "parsing.py"
    helper.write_text("answer = 1")
    with_reward = replace(config, task=replace(config.task, reward="my_rewards:solved"))
    before = identity_of(with_reward)
    helper.write_text("answer = 2")
    (change,) = require_same_run(before, identity_of(with_reward), NO_PROMPTS, NO_PROMPTS)
    assert change.name == "task.reward: source files"
    (mine, theirs), (mine_now, theirs_now) = change.before.split(", "), change.after.split(", ")
    assert mine == mine_now
    assert theirs != theirs_now
    assert theirs.partition(" ")[0] == "parsing.py"


@pytest.mark.parametrize(
    "setting",
    [
        "data.train_data",
        "data.curriculum",
        "task.reward",
        "reward.length_penalty",
        "loss.function",
        "loss.correction",
        "advantage.function",
        "evaluation.function",
    ],
)
def test_corrected_function_is_recorded(setting: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "mine.py"
    source.write_text("def f(): return 1")
    with_function = replace_settings(config, {setting: "mine:f"})
    before = identity_of(with_function)
    source.write_text("def f(): return 2")
    (change,) = require_same_run(before, identity_of(with_function), NO_PROMPTS, NO_PROMPTS)
    assert change.name == f"{setting}: source files"


def test_function_that_returns_other_rows_is_refused_with_its_own_cure(config: Config) -> None:
    config = replace(config, data=replace(config.data, train_data="mine:rows"))
    before = hash_prompts(prompts("a", "b"))
    now = before[::-1]
    with pytest.raises(SettingError) as raised:
        require_same_run(identity_of(config, train=before), identity_of(config, train=now), before, now)
    text = str(raised.value)
    assert text.startswith('data.train_data = "mine:rows": these are not the prompts that the run was made with')
    assert "the 2 prompts are in another order. Let the function return the rows as it did to resume" in text


def test_hash_of_weights_sees_size_name_and_each_byte_of_every_file(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(1 << 20))
    seen = {hash_weights(tmp_path)}
    (tmp_path / "a.safetensors").write_bytes(bytes(777_777) + b"\1" + bytes((1 << 20) - 777_778))
    seen.add(hash_weights(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(bytes((1 << 20) + 1))
    seen.add(hash_weights(tmp_path))
    (tmp_path / "b.bin").touch()
    seen.add(hash_weights(tmp_path))
    (tmp_path / "b.bin").rename(tmp_path / "c.bin")
    seen.add(hash_weights(tmp_path))
    assert len(seen) == 5


def test_every_rule_is_followed() -> None:
    for name, outcome in OUTCOMES.items():
        field = "contents" if ":" in name else "settings"
        settings = dict.fromkeys(setting_names(), "1")
        before, after = (RunIdentity(settings, {}), RunIdentity(settings, {}))
        before = replace(before, **{field: {**getattr(before, field), name: "2"}})
        after = replace(after, **{field: {**getattr(after, field), name: "3"}})
        if outcome == "refused":
            assert refusal(before, after).setting == name.partition(":")[0]
        else:
            expected = [Change(name, "2", "3")] if outcome == "recorded" else []
            assert require_same_run(before, after, NO_PROMPTS, NO_PROMPTS) == expected
