"""A judge that cannot be asked is refused before anything starts, and no secret is repeated."""

from typing import Any

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import ActorSection, Config, EnvironmentSection, JudgeSection, TaskSection
from offbeat.common.settings.judge_checks import check_judge

GOOD: dict[str, Any] = {"url": "http://127.0.0.1:8000/v1", "model": "grader", "key_env": "JUDGE_KEY"}


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"url": "127.0.0.1:8000"}, "judge.url"),
        ({"url": "ftp://host/v1"}, "judge.url"),
        ({"url": "http://host:0/v1"}, "judge.url"),
        ({"url": "http://host:99999/v1"}, "judge.url"),
        ({"url": "http://host/v1?key=secret-7"}, "judge.url"),
        ({"url": "http://me:secret-7@host/v1"}, "judge.url"),
        ({"url": "http://host/v1/chat/completions"}, "judge.url"),
        ({"model": ""}, "judge.model"),
        ({"key_env": "sk-secret-7"}, "judge.key_env"),
        ({"options": {"stream": True}}, "judge.options"),
        ({"options": {"n": 2}}, "judge.options"),
        ({"timeout_s": 30.0}, "judge.timeout_s"),
        ({"max_concurrent": 3}, "judge.max_concurrent"),
    ],
)
def test_judge_that_cannot_be_asked_is_refused(settings: dict[str, Any], setting: str) -> None:
    config = Config(judge=JudgeSection(**{**GOOD, **settings}), actor=ActorSection(reward_workers=4))
    with pytest.raises(SettingError) as raised:
        check_judge(config)
    assert raised.value.setting == setting
    assert "secret-7" not in str(raised.value).replace("?key=secret-7", "")


def test_judge_that_can_be_asked_passes() -> None:
    check_judge(Config())
    check_judge(Config(judge=JudgeSection(**GOOD)))
    # The limits of the environment hold where there is one.
    task, limits = TaskSection(environment="a:b"), EnvironmentSection(turn_timeout_s=60, workers=8)
    check_judge(
        Config(judge=JudgeSection(**GOOD, timeout_s=50), task=task, environment=limits, actor=ActorSection(reward_workers=64))
    )
    with pytest.raises(SettingError, match=r"environment\.workers"):
        check_judge(Config(judge=JudgeSection(**GOOD, max_concurrent=7), task=task, environment=limits))
