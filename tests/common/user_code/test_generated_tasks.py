"""Generated tasks are the same rows wherever they are made, differ between splits, and are scored by their own verifiers."""

from typing import Any

import msgspec
import pytest

from offbeat.actor.rewards.functions import load_reward
from offbeat.actor.rewards.samples import Sample
from offbeat.common.errors import SettingError
from offbeat.common.settings.loading import is_local_data
from offbeat.common.user_code import generated_tasks
from offbeat.common.user_code.functions import is_function
from offbeat.common.user_code.generated_tasks import generated_rows, score
from offbeat.learner.leases.data_rows import read_rows

SOURCE = 'reasoning-gym:chain_sum?size=3&max_digits=1&max_terms=3 + reasoning-gym:basic_arithmetic?size=2&operators=["+","-"]'


def rows(source: str = SOURCE, split: str = "train") -> list[dict[str, Any]]:
    return [row.fields for row in read_rows(source, split, "data.train_data")]


@pytest.mark.slow
def test_rows_of_a_mixture_are_a_function_of_source_and_split() -> None:
    first = rows()
    generated_tasks._entries.cache_clear()
    assert rows() == first
    assert [row["task"] for row in first] == ["chain_sum"] * 3 + ["basic_arithmetic"] * 2
    assert not {row["prompt"] for row in first} & {row["prompt"] for row in rows(split="test")}
    assert rows(SOURCE.replace("size=3", "size=3&seed=1"))[:3] != first[:3]
    # The larger pass begins with the rows of the smaller one, so a run may be given more.
    assert [row["prompt"] for row in rows(SOURCE.replace("size=3", "size=5"))[:3]] == [row["prompt"] for row in first[:3]]
    easy = rows(SOURCE.replace("size=3", "size=3&task=easy"))
    assert [row["task"] for row in easy] == ["easy"] * 3 + ["basic_arithmetic"] * 2
    assert [row["generated"] for row in easy] == [row["generated"] for row in first], "a name changes no row's making"
    assert is_local_data(SOURCE)
    assert not is_function("reasoning-gym:chain_sum")


@pytest.mark.slow
def test_built_in_reward_is_the_generators_own_verifier() -> None:
    reward = load_reward("reasoning_gym").function
    for row in rows():
        assert reward(row["prompt"], row["answer"], row) == 1
        assert reward(row["prompt"], f"first <answer>0</answer>, then <answer> {row['answer']} </answer>.", row) == 1
        assert reward(row["prompt"], "I do not know", row) < 0.1
        assert 0 < reward(row["prompt"], f"{row['answer']} or so", row) < 1, "these verifiers give part of the reward"


def test_wrong_answer_that_the_verifier_cannot_read_is_no_error_of_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    class Verifier:
        is_broken = False

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"question": "q", "answer": "7"}

        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            if self.is_broken:
                raise KeyError("metadata")
            return float(int(answer) == 7)

    verifier = Verifier()
    monkeypatch.setattr(generated_tasks, "_entries", lambda *_: verifier)
    made = {"name": "fake", "options": {}, "size": 1, "seed": 0, "index": 0}
    row = {"prompt": "q", "answer": "7", "generated": made}
    assert (score(row, "7"), score(row, "8"), score(row, "eight")) == (1, 0, 0)
    verifier.is_broken = True
    with pytest.raises(KeyError):
        score(row, "7")


def test_row_of_another_version_is_no_zero() -> None:
    (row, *_) = rows()
    with pytest.raises(ValueError, match="install the learner's version"):
        score({**row, "answer": "another"}, "1")
    with pytest.raises(ValueError, match="no row of reasoning-gym"):
        score({"prompt": "1+1=", "answer": "2"}, "2")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("reasoning-gym:no_such_task", "not registered"),
        ("reasoning-gym:chain_sum?min_terms=9&max_terms=2", "max_terms must be"),
        ("reasoning-gym:chain_sum?colour=3", "unexpected keyword"),
        ("reasoning-gym:chain_sum?size=0", "whole numbers are needed"),
        ("reasoning-gym:chain_sum?size=2.5", "whole numbers are needed"),
        ("reasoning-gym:chain_sum + chain_sum", "'chain_sum' is no generator"),
        ("reasoning-gym:", "is no generator"),
    ],
)
def test_wrong_source_is_refused_in_words(source: str, said: str) -> None:
    with pytest.raises(SettingError, match=r"data\.train_data = ") as raised:
        list(generated_rows(source, "train", "data.train_data"))
    assert said in str(raised.value)


def test_row_is_whole_on_its_way_to_an_actor() -> None:
    (row, *_) = rows()
    arrived = msgspec.json.decode(msgspec.json.encode(row))
    sample = Sample(row["prompt"], row["answer"], arrived, None, "stop", is_evaluation=False)  # pyright: ignore[reportArgumentType]
    assert load_reward("reasoning_gym").outcomes([sample], {})[0].total == 1  # pyright: ignore[reportAttributeAccessIssue]
