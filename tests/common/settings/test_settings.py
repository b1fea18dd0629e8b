"""Settings are read, overridden, written back and explained; errors name the setting and the cure."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.errors import SettingError
from offbeat.common.settings.checks import check
from offbeat.common.settings.completion import complete
from offbeat.common.settings.config import Config, eval_sets
from offbeat.common.settings.loading import (
    explain,
    explanations,
    full_name,
    is_local_data,
    load,
    replace_settings,
    resolved_toml,
    setting_text,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def message(*overrides: str) -> str:
    with pytest.raises(SettingError) as raised:
        load(None, overrides)
    return str(raised.value)


def test_byte_order_mark_of_a_config_file_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[run]\nseed = 7\n")
    assert load(tmp_path / "run.toml").run.seed == 7


def test_without_a_file_all_settings_have_their_defaults() -> None:
    assert load() == complete(Config())


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nnum_steps = 5\nlearning_rate = 1\n")
    config = load(path, ["train.num_steps=6", "train.num_steps=7"])
    assert config.train.num_steps == 7
    assert config.train.learning_rate == 1.0
    assert isinstance(config.train.learning_rate, float)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.lr_schedule=cosine", "train", "lr_schedule", "cosine"),
        ("model.path=/models/a b=c", "model", "path", "/models/a b=c"),
        ("actor.name=7", "actor", "name", "7"),
        ('actor.name="7"', "actor", "name", "7"),
        ("run.resume=true", "run", "resume", True),
        ("train.adam_betas=[0.8, 0.9]", "train", "adam_betas", (0.8, 0.9)),
        ("launch.actor_gpus=[[0],[1,2]]", "launch", "actor_gpus", ((0,), (1, 2))),
        ("staleness.hard_max_staleness=6", "staleness", "hard_max_staleness", 6),
        ("staleness.hard_max_staleness=none", "staleness", "hard_max_staleness", None),
        ("actor.engine_options.max_num_seqs=64", "actor", "engine_options", {"max_num_seqs": 64}),
        ("train.deepspeed.a.b=x", "train", "deepspeed", {"a": {"b": "x"}}),
    ],
)
def test_override_is_read_as_toml_and_else_as_text(override: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load(None, [override]), section), key) == value


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.num_step=3", ["train.num_step", "Did you mean train.num_steps?"]),
        ("train.max_staleness=3", ["train.max_staleness", "Did you mean staleness.max_staleness?"]),
        ("trian.num_steps=3", ["trian", "Did you mean train?"]),
        ("train.zzz=3", ["train.zzz", "The known names are:", "learning_rate"]),
        ("log.wandb=true", ["log.wandb", "Did you mean metrics.wandb_project?"]),
        ("tracking.wandb=true", ["tracking", "Did you mean metrics.wandb_project?"]),
        ("rollout.stop=1", ["rollout.stop", "The known names are:"]),
        ("num_step=3", ["num_step", "Did you mean train.num_steps?"]),
        ("clip=3", ["2 sections have a setting of this name", "reward.clip or advantage.clip"]),
        ("train=3", ["this is a section", "train.num_steps"]),
        ("train.num_steps", ["train.num_steps", "section.key=value"]),
        ("train.num_steps=0", ["train.num_steps = 0", "a whole number, at least 1"]),
        ("train.num_steps=1.5", ["train.num_steps = 1.5", "a whole number"]),
        ("train.num_steps=true", ["train.num_steps = true", "a whole number"]),
        ("train.num_steps=many", ['train.num_steps = "many"', "a whole number"]),
        ("train.learning_rate=nan", ["train.learning_rate = nan", "a number, above 0"]),
        ("train.learning_rate=-1", ["train.learning_rate = -1", "a number, above 0"]),
        ("train.zero_stage=4", ["train.zero_stage = 4", "at most 3"]),
        ("train.adam_betas=[0.9]", ["train.adam_betas = [0.9]", "a list of 2"]),
        ("train.lr_schedule=cosin", ['train.lr_schedule = "cosin"', 'one of "constant", "cosine", "linear"']),
        ("task.reward=no name", ['task.reward = "no name"', "text that matches"]),
        ("staleness.hard_max_staleness=-1", ["staleness.hard_max_staleness = -1", 'at least 0 or "none"']),
        ("train.num_steps.x=1", ["train.num_steps.x", "train.num_steps is not a table"]),
    ],
)
def test_mistake_names_the_setting_the_value_and_the_cure(override: str, parts: list[str]) -> None:
    text = message(override)
    for part in parts:
        assert part in text


def test_setting_has_the_name_that_users_of_other_systems_know(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[staleness]\nmax_off_policy_steps = 7\n")
    assert load(file).staleness.max_staleness == 7
    assert load(file, ["staleness.max_off_policy_steps=3"]).staleness.max_staleness == 3
    file.write_text("[staleness]\nmax_off_policy_steps = 7\nmax_staleness = 7\n")
    with pytest.raises(SettingError, match=r"another name of staleness\.max_staleness"):
        load(file)


def test_malformed_toml_is_reported_with_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nnum_steps = = 5\n")
    with pytest.raises(SettingError, match=r"run\.toml.*line 2"):
        load(path)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"absent\.toml.*No such file"):
        load(tmp_path / "absent.toml")


def test_setting_outside_of_any_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"num_steps = 5: it is outside of any section. Put it under \[train\]"):
        load(write(tmp_path, "num_steps = 5\n"))


def test_unknown_section_of_a_file_is_refused_even_when_empty(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="Did you mean train"):
        load(write(tmp_path, "[trian]\n"))


texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
options = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(
    system_prompt=texts,
    engine_options=st.dictionaries(texts, options, max_size=3),
    learning_rate=st.floats(1e-300, 1e300),
    hard=st.none() | st.integers(0, 10**6),
    gpus=st.lists(st.lists(st.integers(0, 7), max_size=2).map(tuple), max_size=3).map(tuple),
)
def test_resolved_toml_reads_back_as_the_same_config(
    tmp_path_factory: pytest.TempPathFactory,
    system_prompt: str,
    engine_options: dict[str, object],
    learning_rate: float,
    hard: int | None,
    gpus: tuple[tuple[int, ...], ...],
) -> None:
    config = complete(Config())
    config = msgspec.structs.replace(
        config,
        data=msgspec.structs.replace(config.data, system_prompt=system_prompt),
        actor=msgspec.structs.replace(config.actor, engine_options=engine_options),
        train=msgspec.structs.replace(config.train, learning_rate=learning_rate),
        staleness=msgspec.structs.replace(config.staleness, hard_max_staleness=hard),
        launch=msgspec.structs.replace(config.launch, actor_gpus=gpus),
    )
    path = tmp_path_factory.getbasetemp() / "resolved.toml"
    path.write_bytes(resolved_toml(config, with_secrets=True).encode())
    assert load(path) == config


def test_every_setting_has_an_explanation() -> None:
    rows = explanations()
    assert {row.setting.split(".")[0] for row in rows} == set(Config.__struct_fields__)
    assert all(row.text and row.type and row.default for row in rows)


def test_one_setting_is_explained_with_type_default_and_docstring() -> None:
    (row,) = explanations("staleness.max_staleness")
    assert row.type == "a whole number, at least 0"
    assert row.default == "4"
    assert row.text.startswith("Staleness bound")
    assert explain("staleness.max_staleness").startswith("staleness.max_staleness = 4   (a whole number, at least 0)\n    ")


def test_override_needs_no_section_where_its_key_is_unique() -> None:
    config = load(None, ["num_steps=3", "max_off_policy_steps=2", "engine_options.max_num_seqs=4"])
    assert (config.train.num_steps, config.staleness.max_staleness) == (3, 2)
    assert config.actor.engine_options == {"max_num_seqs": 4}


def test_setting_is_explained_by_any_of_its_names() -> None:
    expected = explain("staleness.max_staleness")
    assert explain("max_staleness") == explain("max_off_policy_steps") == expected
    assert explain("engine_options.max_num_seqs").startswith("actor.engine_options = ")
    assert [row.setting.split(".")[0] for row in explanations("lora")] == ["lora"] * 3


def test_explaining_an_unknown_setting_suggests_one() -> None:
    with pytest.raises(SettingError, match=r"Did you mean train\.num_steps"):
        explain("train.num_step")


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("max_staleness", "staleness.max_staleness"),
        ("train.num_steps", "train.num_steps"),
        ("engine_options.max_num_seqs", "actor.engine_options.max_num_seqs"),
        ("max_off_policy_steps", "staleness.max_staleness"),
        ("staleness.max_off_policy_steps", "staleness.max_staleness"),
        ("actor.engine_options.max_num_seqs", "actor.engine_options.max_num_seqs"),
    ],
)
def test_setting_may_be_named_by_a_key_that_only_one_section_has(key: str, setting: str) -> None:
    assert full_name(key) == setting


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("max_stalenes", "Did you mean staleness.max_staleness?"),
        ("clip", "2 sections have a setting of this name. Write reward.clip or advantage.clip."),
        ("train.max_staleness", "Did you mean staleness.max_staleness?"),
        ("trian.num_steps", "Did you mean train?"),
        ("qqqq", "no setting has this name"),
    ],
)
def test_key_that_names_no_setting_or_several_is_refused(key: str, said: str) -> None:
    with pytest.raises(SettingError) as raised:
        full_name(key)
    assert said in str(raised.value)


@given(setting=st.sampled_from([row.setting for row in explanations()]))
def test_every_setting_is_found_by_its_full_name_and_by_its_key_or_not_at_all(setting: str) -> None:
    assert full_name(setting) == setting
    key = setting.partition(".")[2]
    try:
        assert full_name(key) == setting
    except SettingError as error:
        assert setting in str(error)


def test_settings_of_a_config_are_replaced_as_overrides_of_a_file_are() -> None:
    config = load(None, ["staleness.max_staleness=6", "loss.clip_low=0.2"])
    values = {"staleness.staleness_policy": "drop", "train.learning_rate": "1e-4", "loss.clip_low": "none"}
    overrides = ["staleness.max_staleness=6", "staleness.staleness_policy=drop", "train.learning_rate=1e-4", "loss.clip_by=run"]
    assert replace_settings(config, values) == load(None, overrides)
    assert replace_settings(config, {}) == config
    with pytest.raises(SettingError, match=r"staleness.max_staleness = -1: the value is not accepted"):
        replace_settings(config, {"train.learning_rate": "1e-4", "staleness.max_staleness": "-1"})
    with pytest.raises(SettingError, match=r"Did you mean staleness.max_staleness"):
        replace_settings(config, {"staleness.max_stalenes": "1"})


@given(setting=st.sampled_from([row.setting for row in explanations()]))
def test_text_of_a_value_gives_the_value_again(setting: str) -> None:
    config = load(None, ["staleness.hard_max_staleness=8", "loss.dual_clip=3"])
    text = setting_text(config, setting)
    assert replace_settings(config, {setting: text}) == config


def test_data_on_this_machine_is_told_from_a_dataset_by_being_there_or_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("{}")
    assert is_local_data("absent/train.jsonl")
    assert is_local_data("absent/train.PARQUET")
    assert is_local_data("./absent/folder")
    assert is_local_data("a/b/c/d")
    assert is_local_data(str(tmp_path / "rows"))
    assert not is_local_data("openai/gsm8k/main")
    (tmp_path / "loop").symlink_to("loop")
    assert is_local_data(str(tmp_path / "loop"))


def test_folder_with_a_path_of_three_parts_is_not_a_dataset_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openai/gsm8k/main").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_local_data("openai/gsm8k/main")


@pytest.mark.parametrize(
    "override",
    [
        "train.num_steps=1e30",
        "run.seed=1e30",
        "hub.max_message_mb=1e15",
        "weights.port=65536",
        "weights.pull_port=70000",
        "log.min_free_mb=1e30",
        "launch.num_actors=1e30",
        f"actor.name={'a' * 300}",
        'actor.name="a\\nb"',
    ],
)
def test_value_beyond_every_use_is_refused(override: str) -> None:
    with pytest.raises(SettingError, match=override.split("=")[0]):
        load(None, [override])


def test_all_values_that_are_not_accepted_are_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[train]\nnum_steps = "many"\n[hub]\ndead_after_s = -1\nport = 3\n')
    with pytest.raises(SettingError) as raised:
        load(file)
    assert [text.split(" = ")[0] for text in raised.value.texts] == ["train.num_steps", "hub.dead_after_s", "setting"]
    with pytest.raises(SettingError) as raised:
        load(None, ["tempertaure=1", "max_new_tokens=abc", "learning_rate=-1"])
    assert [text.split(" = ")[0] for text in raised.value.texts] == ["setting", "rollout.max_new_tokens", "train.learning_rate"]


@pytest.mark.parametrize("name", ["../x", "a b", "a\n", "\x1b[2J", "x" * 300])
def test_name_that_the_learner_would_refuse_is_refused_as_a_setting(name: str) -> None:
    with pytest.raises(SettingError, match=r"actor\.name"):
        load(None, [f"actor.name={name}"])


def test_one_evaluation_set_is_a_path_and_several_are_a_table() -> None:
    assert eval_sets(load(None, ["data.eval_data=e.jsonl"]).data) == {"": "e.jsonl"}
    several = load(None, ["data.eval_data.math=m.jsonl", "data.eval_data.code=c.jsonl"])
    assert eval_sets(several.data) == {"math": "m.jsonl", "code": "c.jsonl"}
    assert 'eval_data = {"math" = "m.jsonl", "code" = "c.jsonl"}' in resolved_toml(several)


def test_key_of_several_sections_is_described_for_each() -> None:
    assert [row.setting for row in explanations("temperature")] == ["rollout.temperature", "evaluation.temperature"]
    assert [row.setting for row in explanations("num_steps")] == ["train.num_steps"]


def test_learning_rate_that_breaks_a_model_is_warned_about() -> None:
    config = load(None, ["model.path=m", "data.train_data=d.jsonl", "learning_rate=50"])
    assert any(text.startswith("train.learning_rate = 50: AdamW moves") for text in check(complete(config)))
    config = load(None, ["model.path=m", "data.train_data=d.jsonl", "learning_rate=1e-45"])
    assert any("rounding takes away: nothing will change" in text for text in check(complete(config)))
    config = load(None, ["model.path=m", "data.train_data=d.jsonl", "learning_rate=1e-3"])
    assert not any("learning_rate" in text for text in check(complete(config)))


def test_temperature_of_mere_noise_is_warned_about() -> None:
    config = load(None, ["model.path=m", "data.train_data=d.jsonl", "rollout.temperature=50"])
    assert any(text.startswith("rollout.temperature = 50: above 3") for text in check(complete(config)))


@pytest.mark.parametrize("name", ["rollout.top_p", "rollout.top_k", "rollout.min_p", "top_p"])
def test_parameter_that_truncates_the_distribution_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(SettingError, match=r"setting = .*rollout\..*truncates.*lower rollout\.temperature"):
        load(None, [f"{name}=0.9"])
