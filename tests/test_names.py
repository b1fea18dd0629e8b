"""Names that pages, docstrings, comments and texts mention are names that the code has."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from offbeat.common.records.step_metrics import step_metric
from offbeat.common.settings.loading import ALIASES, setting_names
from offbeat.deploy.cli.main import PANELS
from tests.routing_names import routing_metric
from tests.test_docs import PAGES, ROOT, name_of

pytestmark = pytest.mark.slow

ROOMS = ("protocols", "common", "actor", "learner", "lab", "deploy")
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
OTHER_SOURCES = [path for folder in ("tests", "docs", "src/offbeat", ".ci") for path in (ROOT / folder).rglob("*.py")]
DOCUMENTS = [*SOURCES, *(page for page in PAGES if page.name != "CHANGELOG.md")]
"""The pages that are checked; not the changelog, which also has names that are gone."""

_SECTIONS = "|".join(sorted({name.partition(".")[0] for name in setting_names()}))
SETTING = re.compile(rf"(?<![\w./-])((?:{_SECTIONS})\.[a-z][a-z_]*[a-z])\b(?![(/])")
COMMAND = re.compile(r"`offbeat ([a-z]+)")
METRIC = re.compile(r"`((?:reward|lag|length|ratio|clip|clip_tokens|ess|kl|correction|loss|time|compute|by_lag)/[\w/+-]*\w)`")
IDENTIFIER = re.compile(r"`(?![a-z]+`)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`")
"""A name, dotted or not. A single plain word may be anything."""

FILES = re.compile(r"\.(?:toml|jsonl|json|log|md|py|ipynb|safetensors|sbatch|txt|yaml|key|lock|pub)$")
"""Ends of names that are files'."""
NO_SETTINGS = {
    *("environment.cached_tokens", "environment.prompt_tokens", "environment.waiting"),  # fields of metrics rows
    *("actor.environments", "model.layers", "run.folder"),  # a room, and attributes
}
NO_METRICS = {"kl/p_q_k1", "kl/p_q_k3"}
"""Patterns of names."""
SUBSCRIPT = re.compile(r"_[ijktv]{1,2}$")
"""The end of a variable in a formula, such as `l_it`."""
NO_IDENTIFIERS = {
    *("NAME_command", "actor_WORK_share", "num_", "test_stale_group_is_dropped_when_taken"),  # patterns and examples
    *("_2_", "_3_4_", "_5_8_", "_9_up_", "_length_mean", "_max", "_min", "_p05", "_p50", "_p95", "_std"),  # ends of metrics
    *("reversal_batch8", "reversal_batch32", "reversal_batch64"),  # tasks of the study, named after their sizes
    *("ANTHROPIC_BASE_URL", "CUDA_DEVICE_ORDER", "NCCL_SOCKET_IFNAME", "PAGER", "PIP_EXTRA_INDEX_URL"),  # of the environment
    *("COPY", "landlock_create_ruleset"),  # of the system
    *(
        "ChatOpenAI",
        "GraphRecursionError",
        "dump_dir",
        "flash_attn.cute",
        "fp8_per_block",
        "llama3_json",
        "reflect_on_tool_use",
        "return_weight_versions",
        "sleep_mode_backend",
        "watchdog_config",
    ),  # of libraries
    # Settings of other frameworks.
    *("entropy_loss_coef", "is_weight", "kl_horizon", "kl_k3", "kl_penalty", "pg_clip_high", "pg_clip_low"),
    *("ppo_epochs", "rl_loss_coef", "seq_mean_k2", "seq_mean_k3", "target_kl", "train_infer_correction"),
}


@cache
def split(path: Path) -> tuple[str, str, str]:
    """Return the prose of a file (of a source its docstrings and comments), the code of a source, and its strings."""
    text = path.read_text()
    if path.suffix != ".py":
        return re.sub(r"```.*?```", "", text, flags=re.DOTALL), "", ""
    lines, prose, strings = text.split("\n"), [], []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.append(node.value.value)
            lines[node.lineno - 1 : node.end_lineno] = [""] * len(lines[node.lineno - 1 : node.end_lineno])
    for index, line in enumerate(lines):
        code, mark, comment = line.partition("# ")
        if mark and code.count('"') % 2 == 0:
            prose.append(comment)
            lines[index] = code
    return "\n".join(prose), "\n".join(lines), "\n".join(strings)


def texts(path: Path) -> str:
    """Return the prose of a file, and all strings of a source: errors, help, logs."""
    prose, _, strings = split(path)
    return f"{prose}\n{strings}"


@cache
def names_of_code() -> set[str]:
    words = {path.stem for path in [*SOURCES, *OTHER_SOURCES]}
    code = [split(path)[1] for path in [*SOURCES, *OTHER_SOURCES] if path != Path(__file__)]
    return words.union(*(re.findall(r"\w+", text) for text in [*code, *(path.read_text() for path in configs())]))


def configs() -> Iterator[Path]:
    yield from (ROOT / "pyproject.toml", ROOT / "dev")
    yield from (ROOT / "examples").rglob("*.toml")


def unknown(name: str) -> bool:
    """Return True for an identifier, dotted or not, that no code has; a path of modules must lead to one."""
    room, *parts = name.split(".")
    if FILES.search(name) or any(name.startswith(f"{setting}.") for setting in setting_names()):
        return False
    if room in ROOMS and parts and not SETTING.fullmatch(name):
        place = ROOT / room
        while parts and ((place / parts[0]).is_dir() or (place / f"{parts[0]}.py").is_file()):
            place /= parts.pop(0)
        if place == ROOT / room:
            return True
    return any(part not in names_of_code() and not SUBSCRIPT.search(part) for part in (room, *parts))


def test_settings_that_are_mentioned_exist() -> None:
    known = {*setting_names(), *ALIASES, *NO_SETTINGS}
    found = {(name_of(path), name) for path in DOCUMENTS for name in SETTING.findall(texts(path)) if not FILES.search(name)}
    assert sorted((path, name) for path, name in found if name not in known) == []


def test_commands_that_are_mentioned_exist() -> None:
    known = {command for panel in PANELS for command in panel.commands}
    found = {(name_of(path), command) for path in DOCUMENTS for command in COMMAND.findall(texts(path))}
    assert sorted((path, command) for path, command in found if command not in known) == []


def test_metrics_that_are_mentioned_exist() -> None:
    found = {(name_of(path), name) for path in DOCUMENTS for name in METRIC.findall(split(path)[0])}
    assert [one for one in sorted(found) if not (step_metric(one[1]) or routing_metric(one[1]) or one[1] in NO_METRICS)] == []


def test_identifiers_that_are_mentioned_exist() -> None:
    found = {(name_of(path), name) for path in DOCUMENTS for name in IDENTIFIER.findall(split(path)[0])}
    assert [(path, name) for path, name in sorted(found) if name not in NO_IDENTIFIERS and unknown(name)] == []


def test_names_that_no_code_has_are_seen() -> None:
    assert [name for name in ("split", "learner.leases.ledger", "train.log") if unknown(name)] == []
    assert [name for name in ("NoSuchThing", "split.NoSuchThing", "common.no_such_module") if not unknown(name)] == []
    assert SETTING.findall("set loss.no_such, or a/train.log") == ["loss.no_such"]
