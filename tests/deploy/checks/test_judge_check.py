"""A start tells what keeps the judge from answering: a mistake of the settings stops it, a server that is down does not."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.common.settings.config import Config, JudgeSection
from offbeat.deploy.checks.findings import findings_of
from offbeat.deploy.checks.remote_services import check_judge_server
from tests.actor.judges.fake_judge import Answer, serving


def found(url: str, **settings: Any) -> list[tuple[str, str]]:
    config = Config(judge=JudgeSection(url=url, model=settings.pop("model", "grader"), **settings))
    return [(finding.kind, finding.text) for finding in findings_of(lambda: check_judge_server(config))]


def test_judge_that_answers_and_has_the_model_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    assert list(check_judge_server(Config())) == []
    with serving(lambda number, request: Answer()) as fake:
        assert found(fake.url, key_env="JUDGE_KEY", cache=str(tmp_path / "new")) == []
        ((kind, text),) = found(fake.url, model="other")
    assert (kind, "no 'other'" in text) == ("warning", True)


def test_server_that_is_down_is_warned_about() -> None:
    with serving(lambda number, request: Answer()) as fake:
        pass
    ((kind, text),) = found(fake.url)
    assert kind == "warning"
    assert "does not answer" in text


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"key_env": "ABSENT_KEY"}, "judge.key_env"),
        ({"key_env": "sk-secret-7"}, "judge.key_env"),
        ({"cache": "a_file/cache"}, "judge.cache"),
    ],
)
def test_missing_key_and_cache_are_mistakes(
    settings: dict[str, str], setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    (kind, text), *_ = found("http://127.0.0.1:1/v1", **settings)
    assert kind == "mistake"
    assert text.startswith(f"{setting} = ")
    assert "secret-7" not in text, "it may be the key itself"
