"""Changes of settings in a running job: which are allowed, and that a restart keeps them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.errors import SettingError
from offbeat.common.settings.checks import check
from offbeat.common.settings.completion import complete
from offbeat.common.settings.config import Config, DataSection, ModelSection, StalenessSection
from offbeat.common.settings.learning_sections import LossSection, TrainSection
from offbeat.common.settings.loading import replace_settings, setting_text
from offbeat.learner.dispatch.live_settings import CHANGEABLE, LiveSettings
from offbeat.learner.leases.events import Tuned
from offbeat.protocols.messages import SettingChange

GIVEN = complete(Config(model=ModelSection(path="model"), data=DataSection(train_data="data.jsonl")))
DEFAULT_CLIP = str(GIVEN.loss.clip_low)


def change(who: str = "me@host", **settings: str) -> Tuned:
    """`section__key="value"`."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return Tuned(at=7.0, settings=named, who=who, reason="", policy_version=3)


def make(given: Config = GIVEN, *events: Tuned) -> LiveSettings:
    return LiveSettings(given, {setting: event for event in events for setting in event.settings})


def test_change_that_is_allowed_is_proposed_in_toml_and_changes_nothing_yet() -> None:
    live = make()
    settings = {"staleness.max_staleness": " 8", "train.learning_rate": "1e-05", "staleness.staleness_policy": "drop"}
    proposal = live.propose(settings)
    assert proposal.settings == {
        "staleness.max_staleness": "8",
        "train.learning_rate": "1e-05",
        "staleness.staleness_policy": '"drop"',
    }
    assert live.config.staleness.max_staleness == 4
    assert (live.changed, live.in_force()) == ({}, ())


def test_applied_change_is_in_force_and_says_what_was_before() -> None:
    live = make()
    event = change(staleness__max_staleness="8", loss__clip_low="0.25")
    assert live.apply(event) == (
        SettingChange("staleness.max_staleness", "4", "8", "me@host", 7.0, 3),
        SettingChange("loss.clip_low", DEFAULT_CLIP, "0.25", "me@host", 7.0, 3),
    )
    assert (live.config.staleness.max_staleness, live.config.loss.clip_low) == (8, 0.25)
    assert [change.after for change in live.apply(change(staleness__max_staleness="16"))] == ["16"]
    # Against the config file now, not against what was before.
    assert [(change.setting, change.before, change.after) for change in live.in_force()] == [
        ("staleness.max_staleness", "4", "16"),
        ("loss.clip_low", DEFAULT_CLIP, "0.25"),
    ]


def test_setting_that_is_changed_back_is_the_files_again() -> None:
    live = make(GIVEN, change(staleness__max_staleness="8"))
    live.apply(change(staleness__max_staleness="4"))
    assert live.in_force() == ()


def test_value_that_is_in_force_already_is_no_change() -> None:
    live = make(GIVEN, change(staleness__max_staleness="8"))
    settings = {"staleness.max_staleness": "8", "loss.clip_low": "none", "train.learning_rate": "2e-6"}
    assert live.propose(settings).settings == {"train.learning_rate": "2e-06"}


@pytest.mark.parametrize("setting", ["train.num_steps", "loss.objective", "loss.anchor", "rollout.temperature", "no.such"])
def test_other_settings_are_refused_with_those_that_can_be_changed(setting: str) -> None:
    with pytest.raises(SettingError) as raised:
        make().propose({"staleness.max_staleness": "8", setting: "1"})
    text = str(raised.value)
    assert text.startswith(f'{setting} = "1": it cannot be changed during a run.')
    assert all(name in text for name in CHANGEABLE)
    assert "run.resume=true" in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"staleness.max_staleness": "-1"}, "the value is not accepted"),
        ({"staleness.max_staleness": "8.5"}, "the value is not accepted"),
        ({"train.learning_rate": "0"}, "the value is not accepted"),
        ({"train.learning_rate": "inf"}, "the number is not finite"),
        ({"actor.max_inflight_groups": "0"}, "the value is not accepted"),
        ({"actor.max_inflight_groups": "300000"}, "the value is not accepted"),
        ({"staleness.staleness_policy": "drop it"}, "the value is not accepted"),
        ({"loss.clip_low": "1.5"}, "no ratio is below 0"),
        ({"staleness.hard_max_staleness": "3"}, "it is below staleness.max_staleness = 4"),
        ({"staleness.max_staleness": "1"}, "the run would wait forever"),
        ({"staleness.auto": "true"}, "no setting says how far the bound may rise"),
        ({"staleness.max_staleness": "9\n[train]\nnum_steps = 1"}, "the value is not accepted"),
    ],
)
def test_invalid_value_is_refused_as_it_would_be_at_start(settings: dict[str, str], said: str) -> None:
    given = replace_settings(GIVEN, {"train.steps_per_batch": "4", "train.num_steps": "8"})
    live = make(given)
    with pytest.raises(SettingError, match=said):
        live.propose({"train.learning_rate": "1e-3", **settings})
    assert live.config.train.learning_rate == given.train.learning_rate


def test_settings_are_judged_together() -> None:
    both = {"staleness.hard_max_staleness": "3", "staleness.max_staleness": "2"}
    assert set(make().propose(both).settings) == set(both)


def test_clip_band_of_an_objective_without_one_is_refused() -> None:
    given = complete(Config(model=GIVEN.model, data=GIVEN.data, loss=LossSection(objective="sapo")))
    with pytest.raises(SettingError, match=r"loss.clip_low = 0.1: loss.objective = 'sapo\(1, 1.05\)' does not clip"):
        make(given).propose({"loss.clip_low": "0.1"})


def test_only_new_warnings_are_told() -> None:
    narrow = LossSection(clip_low=1e-4, clip_high=1e-4)
    of_run = complete(Config(model=GIVEN.model, data=GIVEN.data, loss=LossSection(clip_by="run")))
    assert make(of_run).propose({"loss.clip_low": "1e-4"}).warnings[0].startswith("loss.clip_low = 0.0001")
    assert make().propose({"loss.clip_low": "1e-4"}).warnings == [], "a completion's own band stays above the noise"
    warned = make(complete(Config(model=GIVEN.model, data=GIVEN.data, loss=narrow)))
    assert warned.propose({"staleness.max_staleness": "8"}).warnings == []


def test_without_a_log_a_change_comes_with_the_warning_that_a_restart_may_undo_it() -> None:
    live = make(replace_settings(GIVEN, {"log.enabled": "false"}))
    warning = "log.enabled = false: a restart before the next checkpoint undoes the change."
    assert live.propose({"staleness.max_staleness": "8"}).warnings == [warning]
    assert live.propose({"staleness.max_staleness": "4"}).warnings == [], "it is 4 already"


def test_restart_goes_on_with_what_was_changed_last() -> None:
    live = make(GIVEN, change(staleness__max_staleness="8", train__learning_rate="1e-3"), change(staleness__max_staleness="6"))
    assert (live.config.staleness.max_staleness, live.config.train.learning_rate) == (6, 1e-3)
    assert {change.setting for change in live.in_force()} == {"staleness.max_staleness", "train.learning_rate"}


def test_restart_with_a_config_that_contradicts_the_change_is_refused_with_both() -> None:
    given = Config(
        model=GIVEN.model, data=GIVEN.data, train=TrainSection(steps_per_batch=4), staleness=StalenessSection(max_staleness=9)
    )
    with pytest.raises(SettingError, match=r"\(staleness.max_staleness = 2\): .* the run would wait forever.*change the file"):
        make(given, change(staleness__max_staleness="2"))


@given(
    st.dictionaries(
        st.sampled_from(CHANGEABLE),
        st.sampled_from(["0", "1", "3", "8", "0.1", "none", "true", "gate", "drop", "abort", "x", ""]),
    )
)
def test_what_is_proposed_is_valid_and_what_is_recorded_gives_it_again(settings: dict[str, str]) -> None:
    live = make()
    try:
        proposal = live.propose(settings)
    except SettingError:
        assert live.config == make().config
        return
    event = Tuned(at=0.0, settings=proposal.settings, who="me", reason="", policy_version=0)
    live.apply(event)
    check(live.config)
    assert live.config == replace_settings(GIVEN, settings)
    assert make(GIVEN, event).config == live.config
    for setting in CHANGEABLE:
        assert (setting in event.settings) == (setting_text(live.config, setting) != setting_text(make().config, setting))
