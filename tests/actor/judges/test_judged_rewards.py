"""The rewards of docs/rewards.md get their verdicts in the processes where they run, and wait while the judge is down."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.actor.judges.client import counts_of_judge, handed_to_processes
from offbeat.actor.rewards import retries
from offbeat.common.settings.config import Config, JudgeSection
from tests.actor.judges.fake_judge import Answer, serving
from tests.actor.rewards.reward_harness import make_runner_of, rewarded, samples, wait

PAGE = Path(__file__).parents[3] / "docs/rewards.md"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's example, in the current folder."""
    (code,) = re.findall(r"```python\n(# my_judged\.py\n.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "my_judged.py").write_text(code)
    before = Path.cwd(), list(sys.path)
    os.chdir(tmp_path)
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.01)
    yield "my_judged"
    os.chdir(before[0])
    sys.path[:] = before[1]
    sys.modules.pop("my_judged", None)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["polite", "polite_plain"])
def test_documented_reward_waits_for_a_judge_that_comes_back(module: str, function: str) -> None:
    with serving(lambda number, request: Answer("Score: 8") if number >= 3 else Answer(status=503)) as fake:
        config = Config(judge=JudgeSection(url=fake.url, model="grader", max_retries=0))
        with handed_to_processes(config):
            runner = make_runner_of(f"{module}:{function}", retry_s=30)
            try:
                runner.submit(1, samples(["please"]))
                assert wait(runner) == {1: rewarded(1, 0.8)}
            finally:
                runner.close()
            counts = counts_of_judge()
    assert (counts["requests"], counts["failed"]) == (4, 3)
    assert "please" in fake.requests[-1]["messages"][0]["content"]
