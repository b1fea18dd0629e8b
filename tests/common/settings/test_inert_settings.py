"""Settings that nothing reads are refused before a run begins, and only there."""

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.checks import check, check_before_run
from offbeat.common.settings.loading import load, resolved_toml

GOOD = ("model.path=some/model", "data.train_data=train.jsonl")

INERT = {
    "advantage.turns=to_go": ["task.environment names no function", "set task.environment"],
    "advantage.gamma=0.9": ["one advantage for a completion", 'advantage.baseline="critic" or kl.reward_coef'],
    "advantage.gae_lambda=0.9": ["has no critic"],
    "critic.value_clip=none": ["critic.value_clip = none", "has no critic"],
    "critic.loss_coef=1": ["has no critic"],
    "critic.updates_per_step=2": ["critic.updates_per_step = 2", "has no critic"],
    "critic.target_lambda=1": ["has no critic"],
    "reward.overlong_penalty=2": ["reward.overlong_buffer = 0", "set reward.overlong_buffer"],
    "kl.estimator=k2": ["kl.loss_coef = 0 and kl.reward_coef = 0", "set one of them"],
    "weights.delta=true": ["weights.backend = 'auto'", 'set weights.backend="pull"'],
    "lora.alpha=64": ["lora.rank = 0 trains all weights", "set lora.rank"],
}
"""Settings that are inert under `loss.objective = "dr_grpo"`, with parts of the refusal."""
READERS = {
    "advantage.turns=to_go": ["task.environment=my_task:play"],
    "advantage.gamma=0.9": ["kl.reward_coef=0.1"],
    "advantage.gae_lambda=0.9": ["loss.objective=ppo"],
    "critic.value_clip=none": ["loss.objective=ppo"],
    "critic.loss_coef=1": ["loss.objective=ppo"],
    "critic.updates_per_step=2": ["loss.objective=sao", "critic.trunk=own"],
    "critic.target_lambda=1": ["loss.objective=sao"],
    "reward.overlong_penalty=2": ["reward.overlong_buffer=5"],
    "kl.estimator=k2": ["kl.loss_coef=0.1"],
    "weights.delta=true": ["weights.backend=pull"],
    "lora.alpha=64": ["lora.rank=8"],
}
"""For each of them settings that give it a reader."""


@pytest.mark.parametrize("setting", INERT)
def test_setting_that_nothing_reads_is_refused_with_its_value_and_cure(setting: str) -> None:
    with pytest.raises(SettingError) as raised:
        check_before_run(load(None, [*GOOD, "loss.objective=dr_grpo", setting]))
    assert raised.value.setting == setting.partition("=")[0]
    assert "nothing reads it" in str(raised.value)
    for part in INERT[setting]:
        assert part in str(raised.value)


@pytest.mark.parametrize("setting", INERT)
def test_cure_of_the_refusal_lets_the_run_begin(setting: str) -> None:
    assert check_before_run(load(None, [*GOOD, "loss.objective=dr_grpo", setting, *READERS[setting]])) == []


def test_warm_up_that_is_over_before_the_policy_learns_is_refused() -> None:
    given = [*GOOD, "loss.objective=sao", "critic.trunk=own", "critic.alone_until=20"]
    assert check_before_run(load(None, [*given, "train.warmup_steps=21"])) == []
    with pytest.raises(SettingError, match=r"train.warmup_steps = 20: .*critic.alone_until = 20"):
        check_before_run(load(None, [*given, "train.warmup_steps=20"]))
    check_before_run(load(None, [*given, "train.warmup_steps=20", "run.resume=true"]))


@pytest.mark.parametrize("objective", ["gspo", "dapo", "sapo", "ppo", "reinforce"])
def test_settings_that_a_runs_folder_holds_are_not_taken_for_the_users(objective: str, tmp_path) -> None:
    config = load(None, [*GOOD, f"loss.objective={objective}"])
    (tmp_path / "config.toml").write_text(resolved_toml(config))
    assert check_before_run(load(tmp_path / "config.toml")) == check(config)


def test_run_that_began_with_inert_settings_can_be_resumed_and_read(tmp_path) -> None:
    (tmp_path / "config.toml").write_text(resolved_toml(load(None, [*GOOD, "advantage.gamma=0.9", "kl.estimator=k2"])))
    assert check_before_run(load(tmp_path / "config.toml", ["run.resume=true"])) == []
    assert check(load(tmp_path / "config.toml")) == []


def test_own_functions_leave_nothing_to_settings_of_what_they_replace() -> None:
    with pytest.raises(SettingError) as raised:
        check_before_run(load(None, [*GOOD, "loss.function=mine:loss", "loss.dual_clip=3"]))
    assert raised.value.setting == "loss.dual_clip"


@pytest.mark.parametrize("name", ["workers", "concurrency", "calls_per_s", "batch_size"])
def test_limits_of_a_reward_function_beside_an_environment_are_refused(name: str) -> None:
    given = [*GOOD, f"actor.reward_{name}=2"]
    assert check_before_run(load(None, given)) == []
    with pytest.raises(SettingError, match=f"actor.reward_{name} = 2.*task.environment returns the reward"):
        check_before_run(load(None, [*given, "task.environment=games:play"]))


def test_contradictions_and_inert_settings_are_told_together() -> None:
    with pytest.raises(SettingError) as raised:
        check_before_run(load(None, [*GOOD, "loss.clip_low=1.5", "kl.estimator=k2"]))
    assert [text.split(" = ")[0] for text in raised.value.texts] == ["loss.clip_low", "kl.estimator"]


def test_warning_about_a_run_is_told_once() -> None:
    (warning,) = check_before_run(load(None, [*GOOD, "task.environment=games:play", "staleness.staleness_policy=abort"]))
    assert "long ones may never reach a batch" in warning
