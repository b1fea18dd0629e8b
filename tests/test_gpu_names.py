"""Names that the source uses of vLLM, torch's GPU modules and DeepSpeed are defined in their CUDA wheels as in the CPU ones."""

import importlib.util
import json
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests import gpu_names
from tests.gpu_names import TABLE, Definitions, Folder, Use, differences, find_uses, losses, read_pins, read_range

WRITE = "run: python .ci/read_cuda_wheels.py"
TABLE_OF_WHEELS = json.loads(TABLE.read_text())
NAMES: dict[str, str] = TABLE_OF_WHEELS["names"]
OTHERS: dict[str, list[str]] = TABLE_OF_WHEELS["others"]
"""Differences from `NAMES` in the other versions of vLLM that are allowed, with their torch, by version."""


@pytest.fixture(scope="module")
def uses() -> list[Use]:
    return find_uses()


@pytest.fixture(scope="module")
def installed() -> Definitions:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Definitions(Folder(Path(spec.origin).parents[1]))


def test_wheels_were_read_for_the_pins_of_the_project() -> None:
    assert (TABLE_OF_WHEELS["pins"], TABLE_OF_WHEELS["range"]) == (read_pins(), read_range()), WRITE


def test_wheels_were_read_for_each_minor_version_of_vllm_that_is_allowed() -> None:
    read = {Version(version).release[:2] for version in (read_pins()["vllm"], *OTHERS)}
    allowed = SpecifierSet(read_range())
    assert read == {(0, minor) for minor in range(100) if f"0.{minor}.0" in allowed}, WRITE


@pytest.mark.parametrize("version", OTHERS)
def test_no_name_or_parameter_is_gone_in_another_version_that_is_allowed(version: str) -> None:
    assert OTHERS[version], "an empty list may mean that nothing was read"
    assert losses(OTHERS[version]) == []


def test_wheels_were_asked_for_every_name_that_the_source_uses(uses: list[Use]) -> None:
    assert sorted(NAMES) == sorted({use.name for use in uses}), WRITE
    # Names of each kind: imported, of a module, of an object.
    assert {"vllm.inputs.tokens_input", "torch.cuda.set_device", "vllm.v1.engine.llm_engine.LLMEngine.step"} <= NAMES.keys()


@pytest.mark.slow
def test_cuda_wheels_define_names_as_the_installed_build_does(installed: Definitions) -> None:
    here = {name: text for name, text in NAMES.items() if importlib.util.find_spec(name.partition(".")[0])}
    differing = {name: (text, installed.describe(name)) for name, text in here.items() if installed.describe(name) != text}
    assert differing == {}


def test_keywords_of_a_call_are_parameters_in_the_cuda_wheels(uses: list[Use]) -> None:
    with_keywords = [use for use in uses if use.keywords]
    assert with_keywords
    assert {use: unknown for use in with_keywords if (unknown := unknown_keywords(use, NAMES[use.name]))} == {}


def unknown_keywords(use: Use, definition: str) -> set[str]:
    words = definition.replace("class ", "").replace("(", " ").replace(")", " ").replace(",", " ").replace(";", " ").split()
    return set() if any(word.startswith("**") for word in words) else set(use.keywords) - {word.rstrip("=") for word in words}


def test_keyword_that_is_no_parameter_is_seen() -> None:
    assert unknown_keywords(Use("f", "", ("a", "b")), "class (a, *, c=)") == {"b"}
    assert unknown_keywords(Use("f", "", ("b",)), "(a, **others)") == set()


SOURCES = {
    "pack/__init__.py": """
from .first import *
from .second import Other as Renamed
MODULE_ATTRS = {"Lazy": ".second:Other"}
def __getattr__(name):
    if name == "made": return 1
""",
    "pack/first.py": "import sys\nif sys.argv:\n    def f(a, /, b=1, *rest, c, d=2, **others): ...\nelse:\n    f = None",
    "pack/second.py": """
class Base:
    x: int
    def g(self, old): ...
class Other(Base):
    def __init__(self, size): self.y = size
alias = Other()
""",
}


class Text:
    def read(self, path: str) -> str | None:
        return SOURCES.get(path)


@pytest.mark.parametrize(
    ("name", "definition"),
    [
        ("pack.f", "(a, b=, *rest, c, d=, **others)"),
        ("pack.Renamed", "class (size)"),
        ("pack.Lazy.g", "(old)"),
        ("pack.second.Base", "class (x)"),
        ("pack.second.Other.y", "value"),
        ("pack.second.alias.g", "(old)"),
        ("pack.made", "value"),
        ("pack.first", "module"),
    ],
)
def test_definition_is_found_wherever_it_stands(name: str, definition: str) -> None:
    assert Definitions(Text()).describe(name) == definition


@pytest.mark.parametrize("name", ["pack.g", "pack.Lazy.h", "pack.third.f", "pack.second.Other.z"])
def test_name_that_is_not_defined_is_seen(name: str) -> None:
    with pytest.raises(LookupError, match=name):
        Definitions(Text()).describe(name)


def test_what_another_version_defines_otherwise_is_said_by_name_and_parameter() -> None:
    before = {"p.a": "(x)", "p.b": "class (x, y, z=)", "p.c": "value", "p.d": "(x, y)", "p.e": "value"}
    after = {"p.b": "class (x, w, z)", "p.c": "module", "p.d": "(y, x)", "p.e": "value", "p.f": "(x)"}
    assert differences(before, after) == [
        "gone: p.a",
        "new: p.f (x)",
        "changed: p.b: -y -z= +w +z",
        "changed: p.c: -value +module",
        "changed: p.d: another order",
    ]


def test_lost_names_and_parameters_that_the_source_uses_are_told_from_others() -> None:
    gone = ["gone: p.a", "changed: p.b: -weight_versions +w", "changed: p.c: -value +module"]
    kept = [
        "new: p.f (x)",
        "changed: p.d: -timeout +timeout= +z",
        "changed: p.e: another order",
        "changed: p.g: -not_used_by_us",
    ]
    assert losses([*gone, *kept]) == gone


def test_uses_are_found_with_their_full_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/module.py").write_text(
        "import torch.distributed as dist\nimport torch\nfrom vllm.inputs import tokens_input as made\n"
        "dist.send(1, dst=2)\nmade(3)\nimport vllm\nvllm.LLM().generate\ntorch.tensor(1).cuda()\n"
    )
    monkeypatch.setattr(gpu_names, "ROOT", tmp_path)
    uses = {(use.name, use.keywords) for use in find_uses()} - {(name, ()) for name in gpu_names.ALSO}
    assert uses == {
        ("torch.distributed.send", ("dst",)),
        ("vllm.inputs.tokens_input", ()),
        ("vllm.LLM", ()),
    }
