"""Environments on this machine: those that are installed, and the folder of a new one.

offbeat environments              what is here, and what a config says to use it
offbeat new environment shop      shop/environment.py, run.toml, test_environment.py, README.md
"""

import ast
import importlib.util
import json
import keyword
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import FRAMEWORKS
from offbeat.common.user_code.external_environment import host_variables

LOOK_S = 60.0
"""Longest time in which another Python lists its packages."""
_LIST = """
import importlib.metadata, json, re
found = []
for one in importlib.metadata.distributions():
    if not one.metadata["Name"]:
        continue  # What a broken installation has left.
    needs = [re.match(r"[\\w.-]+", need)[0].lower() for need in one.requires or () if "extra ==" not in need]
    found.append([one.metadata["Name"], one.version, needs])
print(json.dumps(found))
"""


class Found(NamedTuple):
    """An environment, or a library of them."""

    name: str
    about: str
    setting: str
    """The lines of a config that use it."""


def find_environments(python: str) -> list[Found]:
    """Return the environments of the current folder, of offbeat's Python, and of `python` (empty: offbeat's alone)."""
    found = [*_of_folder(Path.cwd())]
    if importlib.util.find_spec("reasoning_gym") is not None:
        found.append(
            Found("reasoning-gym", "generators with their verifiers", 'data.train_data = "reasoning-gym:chain_sum?size=2000"')
        )
    found += _of_python(python or sys.executable)
    return found


def _of_folder(folder: Path) -> Iterator[Found]:
    """Yield the functions `play(chat, row)` in the modules of a folder, and of the folders in it."""
    for file in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")]):
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        module = ".".join(file.relative_to(folder).with_suffix("").parts)
        for node in tree.body:
            if isinstance(node, ast.AsyncFunctionDef) and [one.arg for one in node.args.args[:2]] == ["chat", "row"]:
                about = (ast.get_docstring(node) or "").partition("\n")[0]
                yield Found(f"{module}:{node.name}", about, f'task.environment = "{module}:{node.name}"')


def _of_python(python: str) -> Iterator[Found]:
    try:
        listed = subprocess.run(
            [python, "-c", _LIST], env=host_variables(), capture_output=True, timeout=LOOK_S, check=True
        ).stdout
        packages = msgspec.json.decode(listed, type=list[tuple[str, str, list[str]]])
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        raise SettingError(
            "--python", python, f"it cannot list its packages ({error})", "Give the path of a Python."
        ) from error
    where = "" if python == sys.executable else f"\nenvironment.python = {json.dumps(python)}"
    versions = {name.lower(): version for name, version, _ in packages}
    for framework in FRAMEWORKS:
        if framework in versions:
            about = f"version {versions[framework]}"
            yield Found(framework, about, f'task.environment = "{framework}:NAME"{where}')
    for name, version, needs in sorted(packages):
        if "verifiers" in needs:
            yield Found(name, f"version {version}, of verifiers", f'task.environment = "verifiers:{name}"{where}')


def write_environment(name: str) -> Path:
    """Write the folder of a new environment, which trains as it is.

    Raise `SettingError` for a name that cannot be one, and where the folder cannot be written.
    """
    if not re.fullmatch(r"[a-z]\w*", name):
        raise SettingError("NAME", name, "it is the name of a folder of Python modules", "Write it as shop or word_game.")
    folder = Path(name)
    if folder.exists():
        raise SettingError("NAME", name, "there is such a file or folder", "Take another name, or delete it.")
    if keyword.iskeyword(name) or importlib.util.find_spec(name) is not None:
        raise SettingError("NAME", name, "Python has a keyword or a module of this name", "Take another name.")
    try:
        folder.mkdir()
        for file, text in _FILES.items():
            (folder / file).write_text(text.replace("NAME", name), encoding="utf-8")
    except OSError as error:
        problem = f"it cannot be written here ({error.strerror})"
        raise SettingError("NAME", name, problem, "Change to a folder that you may write to.") from error
    return folder


_FILES = {
    "environment.py": '''"""A look-up game: the model asks for entries of a table, and answers with the digit that it finds."""

import random

MAX_TURNS = 4
KEYS, DIGITS = "abcdefghij", "0123456789"


async def play(chat, row):
    """Play one episode; return its reward."""
    for turn in range(1, MAX_TURNS + 1):
        chat.metric("turns", turn)
        reply = await chat.sample(max_new_tokens=2)
        if reply.text.startswith("!"):
            return float(reply.text[1:] == row["answer"])
        chat.add("tool", row["table"].get(reply.text[1:], "."))
    return 0.0


def rows(split):
    """Yield the prompts of a split, always the same ones."""
    generator = random.Random(split)
    for _ in range(2000 if split == "train" else 64):
        first, second = generator.sample(KEYS, 2)
        table = {key: generator.choice(KEYS + DIGITS) for key in KEYS}
        table.update({first: second, second: generator.choice(DIGITS)})
        yield {"prompt": f"{first}:", "table": table, "answer": table[second]}
''',
    "run.toml": """# offbeat train NAME/run.toml

[run]
dir = "runs/NAME-{time}"

# A model of 0.3 M parameters that knows the moves of the game. Name your own: a folder, or a model of the hub.
[model]
path = "{lookup}/model"
dtype = "float32"
max_length = 32

[data]
train_data = "NAME.environment:rows"
eval_data = "NAME.environment:rows"
max_prompt_tokens = 8

[task]
environment = "NAME.environment:play"

[environment]
turn_timeout_s = 10
episode_timeout_s = 30

[rollout]
group_size = 8
max_new_tokens = 2
lease_timeout_s = 120

[train]
num_steps = 40
groups_per_step = 32
learning_rate = 5e-4
micro_batch_tokens = 8192

[hub]
address = "tcp://127.0.0.1:0"

[actor]
max_inflight_groups = 16

[evaluation]
interval = 20
num_prompts = 64
temperature = 1.0
""",
    "test_environment.py": '''"""Play the game with scripted answers: python -m pytest NAME"""

import asyncio
from types import SimpleNamespace

from NAME.environment import play, rows


class ScriptedChat:
    """Stands for the model."""

    def __init__(self, *texts):
        self.texts = list(texts)
        self.read = []

    async def sample(self, max_new_tokens=None):
        return SimpleNamespace(text=self.texts.pop(0))

    def add(self, role, content):
        self.read.append(content)

    def metric(self, name, value):
        pass


def test_two_look_ups_find_the_answer():
    row = {"prompt": "a:", "table": {"a": "c", "c": "7"}, "answer": "7"}
    chat = ScriptedChat("?a", "?c", "!7")
    assert asyncio.run(play(chat, row)) == 1.0
    assert chat.read == ["c", "7"]


def test_wrong_answer_and_endless_search_earn_nothing():
    row = {"prompt": "a:", "table": {"a": "c", "c": "7"}, "answer": "7"}
    assert asyncio.run(play(ScriptedChat("!3"), row)) == 0.0
    assert asyncio.run(play(ScriptedChat(*["?a"] * 4), row)) == 0.0


def test_rows_are_the_same_each_time():
    assert list(rows("test")) == list(rows("test"))
''',
    "README.md": """# NAME

`environment.py` has the game, `play(chat, row)`, and its prompts, `rows(split)`. Change them, and the model in `run.toml`.

```sh
python -m pytest NAME          # plays with scripted answers
offbeat check NAME/run.toml
offbeat train NAME/run.toml    # about a minute on two cores
```

docs/environments.md of offbeat has all that `chat` can do.
""",
}
"""The files of a new environment."""
