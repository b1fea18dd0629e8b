"""The tools of an environment stand in the prompts that the learner renders, and in what its workers render after them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import DataSection, Environment
from offbeat.common.settings.loading import load
from offbeat.common.user_code.environment_function import load_environment, offer_tools, with_tools
from offbeat.learner.leases.prompts import load_prompts

MODULE = '''
from offbeat.environments import tools

def add(a: int) -> int:
    """DESCRIPTION

    Args:
        a: A number.
    """
    return a

def undescribed(a: int) -> int:
    return a

async def alone(chat, row):
    return 0.0

play = tools([add], reward=lambda answer, row: 1.0)
bare = tools([undescribed], reward=lambda answer, row: 1.0)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (("first_tools", "Add one."), ("second_tools", "Add two.")):
        (tmp_path / f"{name}.py").write_text(MODULE.replace("DESCRIPTION", text))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2"}\n')


@pytest.fixture(scope="module")
def tokenizer(tiny_bpe_model: Path) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_bpe_model)
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.description }}{% endfor %}{{ messages[0].content }}"
    )
    return tokenizer


def data(**settings: Any) -> DataSection:
    return DataSection(train_data="rows.jsonl", prompt_field="prompt", chat_template=True, **settings)


def prompt(tokenizer: Any, environment: str, **settings: Any) -> tuple[str, int]:
    (prompt,) = load_prompts("rows.jsonl", "train", data(**settings), tokenizer, environment=Environment(environment)).prompts
    return tokenizer.decode(prompt.token_ids), prompt.content_hash


def test_template_has_the_tools_and_other_tools_are_other_prompts(tokenizer: Any) -> None:
    """A resumed run compares its prompts, so it refuses other tools."""
    first, first_hash = prompt(tokenizer, "first_tools:play")
    second, second_hash = prompt(tokenizer, "second_tools:play")
    assert (first, second) == ("Add one.2 + 2", "Add two.2 + 2")
    assert first_hash != second_hash
    assert prompt(tokenizer, "first_tools:alone")[0] == "2 + 2"
    assert prompt(tokenizer, "first_tools:play", template_arguments={"tools": []})[0] == "2 + 2"


def test_workers_have_the_same_arguments_as_the_learner() -> None:
    own = {"think": True}
    function = load_environment("first_tools:play")
    config = load(None, ["task.environment=first_tools:play", "template_arguments.think=true", "tool_parser=hermes"])
    in_worker = asyncio.run(offer_tools(function, config))
    assert in_worker == with_tools(data(template_arguments=own), Environment("first_tools:play")).template_arguments
    assert set(in_worker) == {"think", "tools"}


def test_tools_whose_calls_nothing_reads_are_refused() -> None:
    function = load_environment("first_tools:play")
    with pytest.raises(SettingError, match=r'environment\.tool_parser = "": .*nothing reads the model.s calls.*"hermes"'):
        asyncio.run(offer_tools(function, load(None, ["task.environment=first_tools:play"])))


def test_tool_without_a_description_is_refused_with_its_name() -> None:
    with pytest.raises(SettingError, match=r"task\.environment.*cannot be described.*undescribed"):
        with_tools(data(), Environment("first_tools:bare"))
