"""Who may import whom, read from the source."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocols", "common", "actor", "learner", "deploy")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

ALLOWED = {
    "protocols": {"protocols"},
    "common": {"common", "protocols"},
    "actor": {"actor", "common", "protocols"},
    "learner": {"learner", "common", "protocols"},
    "deploy": {"deploy", "actor", "learner", "common", "protocols"},
}
ONLY_UNDER = {"vllm": "actor", "deepspeed": "learner", "zmq": "protocols"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> Iterator[str]:
    """Top-level names of whatever a module imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.split(".")[0] for alias in names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield module.split(".")[0]
            case ast.ImportFrom():
                yield path.relative_to(ROOT).parts[0]
            case ast.Call(func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"), args=args):
                yield from (str(arg.value).split(".")[0] for arg in args if isinstance(arg, ast.Constant))


def test_there_are_modules_in_every_package() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(PACKAGES)
    assert all((ROOT / package / "__init__.py").is_file() for package in PACKAGES)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_imports_only_the_packages_below_its_own(path: Path) -> None:
    ours = {name for name in imported(path) if name in PACKAGES}
    assert ours <= ALLOWED[path.relative_to(ROOT).parts[0]]


@pytest.mark.parametrize("library", ONLY_UNDER)
def test_heavy_library_is_imported_under_one_package_only(library: str) -> None:
    importers = {path.relative_to(ROOT).parts[0] for path in MODULES if library in imported(path)}
    assert importers == {ONLY_UNDER[library]}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_says_what_it_is_about(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_is_named_after_one_of_the_standard_library(path: Path) -> None:
    own = path.stem if path.stem != "__init__" else path.parent.name
    assert own not in sys.stdlib_module_names


def test_tests_are_no_packages_and_their_names_are_unique() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert len({path.name for path in tests}) == len(tests)
    assert "__init__.py" not in {path.name for path in tests}
