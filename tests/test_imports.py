"""Every room imports only the rooms it may, according to the source."""

import ast
import itertools
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from offbeat.deploy.cli.main import PANELS

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocols", "common", "actor", "learner", "lab", "deploy")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

ALLOWED = {
    "protocols": set(),
    "common": {"protocols"},
    "common/settings": {"common", "common/models", "protocols"},
    "common/models": {"common", "common/processes", "protocols"},
    "common/pages": {"common", "common/records"},
    "common/processes": {"common"},
    "common/records": {"common", "common/processes", "common/settings", "protocols"},
    "common/user_code": {"common", "common/processes", "common/records", "common/settings", "protocols"},
    "common/user_code/environment_host": set(),
    "common/weights": {"protocols"},
    "actor": {"actor/*", "common/*", "common", "protocols"},
    "actor/engines": {"common/*", "common", "protocols"},
    "actor/weights": {"actor/engines", "common/weights", "protocols"},
    "actor/rewards": {"common/*", "common", "protocols"},
    "actor/judges": {"actor/rewards", "common/*", "common", "protocols"},
    "actor/environments": {
        "actor",
        "actor/engines",
        "actor/rewards",
        "actor/environments/endpoint",
        "common/*",
        "common",
        "protocols",
    },
    "actor/environments/endpoint": {"actor/environments", "common/*", "common", "protocols"},
    "actor/sandbox": {"actor/rewards", "common/processes"},
    "learner": {"learner/*", "common/*", "common", "protocols"},
    "learner/leases": {"common/*", "common", "protocols"},
    "learner/objectives": {"common/*", "common"},
    "learner/policy": {"common/*", "common"},
    "learner/calibration": {"learner/objectives", "common/*", "common", "protocols"},
    "learner/diagnostics": {"learner/leases", "learner/objectives", "learner/calibration", "common/*", "common", "protocols"},
    "learner/weights": {"learner/diagnostics", "common/*", "common", "protocols"},
    "learner/training": {
        "learner/leases",
        "learner/objectives",
        "learner/policy",
        "learner/diagnostics",
        "learner/calibration",
        "common/*",
        "common",
        "protocols",
    },
    "learner/dispatch": {"learner/leases", "learner/diagnostics", "common/*", "common", "protocols"},
    "learner/reporting": {
        "learner",
        "learner/leases",
        "learner/dispatch",
        "learner/diagnostics",
        "learner/calibration",
        "common/*",
        "common",
        "protocols",
    },
    "learner/restart": {
        "learner/leases",
        "learner/dispatch",
        "learner/training",
        "learner/reporting",
        "common/*",
        "common",
        "protocols",
    },
    "lab": {"learner/*", "common/*", "common", "protocols"},
    "lab/report": {"lab", "learner/*", "common/*", "common", "protocols"},
    "lab/simulation": {"lab", "learner/*", "common/*", "common", "protocols"},
    "lab/sweep": {"lab", "lab/report", "learner/*", "common/*", "common", "protocols"},
    "deploy": set(),
    "deploy/clusters": {"deploy/local", "common/*", "common", "protocols"},
    "deploy/local/quickstart": {"learner/*", "common/*", "common"},
    "deploy/local": {
        "actor/engines",
        "deploy/cli",
        "deploy/operating",
        "deploy/clusters",
        "lab",
        "lab/report",
        "learner/calibration",
        "learner/training",
        "common/*",
        "common",
        "protocols",
    },
    "deploy/operating": {"lab", "common/*", "common", "protocols"},
    "deploy/checks": {"deploy/local", "actor", "actor/*", "learner", "learner/*", "common/*", "common", "protocols"},
    "deploy/experiments": {
        "deploy/*",
        "deploy",
        "lab",
        "lab/report",
        "lab/sweep",
        "actor/rewards",
        "learner/*",
        "common/*",
        "common",
        "protocols",
    },
    "deploy/cli": {
        "deploy",
        "deploy/*",
        "lab",
        "lab/*",
        "actor",
        "actor/*",
        "learner",
        "learner/*",
        "common/*",
        "common",
        "protocols",
    },
}
"""The rooms that each room may import besides itself; `learner/*` is every room of the learner."""
WITHOUT_TORCH = ("learner/leases", "learner/dispatch", "lab/simulation")
"""Rooms whose modules import nothing in `SLOW`, not even indirectly."""
QUICK_COMMANDS = (
    "audit",
    "replay",
    "simulate",
    "status",
    "set",
    "scale",
    "reconcile",
    "check",
    "report",
    "drift",
    "sweep",
    "runs",
    "compare",
    "trace",
)
SLOW = ("torch", "transformers", "datasets", "deepspeed", "vllm", "scipy")
ONLY_UNDER = {"vllm": "actor", "deepspeed": "learner", "zmq": "protocols"}


def room_of(path: Path) -> str:
    """Return the folder of a module: `learner/leases`, `common`."""
    return str(path.parent.relative_to(ROOT))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def source(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Return the dotted names that a module imports, inside functions too."""
    return tuple(find_imports(path))


def find_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(source(path)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(level=0, module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.ImportFrom():
                pytest.fail(f"{name_of(path)}:{node.lineno} is a relative import")
            case ast.Call(func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"), args=args):
                yield from (str(arg.value) for arg in args if isinstance(arg, ast.Constant))


def rooms_imported(path: Path) -> set[str]:
    """Return the rooms of this project that a module imports."""
    rooms: set[str] = set()
    for name in imported(path):
        first, *parts = name.split(".")
        assert first not in PACKAGES, f"{name_of(path)} imports {name}: say offbeat.{name}"
        if first != "offbeat":
            continue
        folder = ROOT
        for part in parts:
            if not (folder / part).is_dir():
                break
            folder /= part
        rooms.add(str(folder.relative_to(ROOT)))
    return rooms


def may_import(room: str, other: str) -> bool:
    return other == room or other in ALLOWED[room] or (f"{other.split('/')[0]}/*" in ALLOWED[room] and "/" in other)


def test_every_folder_is_a_room_with_rules() -> None:
    assert {room_of(path) for path in MODULES} == set(ALLOWED)
    assert all((ROOT / room / "__init__.py").is_file() for room in ALLOWED)


def test_the_installed_package_is_made_of_the_folders_at_the_top() -> None:
    links = {path.name: path.resolve() for path in (ROOT / "src/offbeat").iterdir() if path.is_symlink()}
    assert links == {package: ROOT / package for package in PACKAGES}


def test_every_module_imports_only_rooms_that_its_own_may() -> None:
    forbidden = {
        (name_of(path), other) for path in MODULES for other in rooms_imported(path) if not may_import(room_of(path), other)
    }
    assert forbidden == set()


@pytest.mark.parametrize("library", ONLY_UNDER)
def test_heavy_library_is_imported_under_one_package_only(library: str) -> None:
    importers = {room_of(path).split("/")[0] for path in MODULES if library in {name.split(".")[0] for name in imported(path)}}
    assert importers == {ONLY_UNDER[library]}


def slow_imports(modules: list[str]) -> list[str]:
    """Import modules in a fresh interpreter and return each that loads a slow library that was not loaded before."""
    program = f"""
import importlib, sys
for module in {modules}:
    before = set(sys.modules)
    importlib.import_module(module)
    for library in {SLOW}:
        if library in set(sys.modules) - before:
            print(module, "loads", library)
"""
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_room_is_imported_without_torch(room: str) -> None:
    modules = [".".join(("offbeat", *path.relative_to(ROOT).with_suffix("").parts)) for path in (ROOT / room).glob("*.py")]
    assert len(modules) > 5
    assert slow_imports(modules) == []


@pytest.mark.slow
@pytest.mark.slow
def test_the_model_of_the_noise_imports_scipy_only_to_fit_it() -> None:
    # Every trainer imports the model; the scipy that fits it would cost half a second of CPU time.
    assert "scipy" not in {line.split()[-1] for line in slow_imports(["offbeat.learner.calibration.noise_floor"])}


def imports_at_start(command: str) -> Iterator[str]:
    """Yield the modules that a command imports before it does anything: with its file, and at the top of its function."""
    panel = next(panel for panel in PANELS if command in panel.commands)
    yield f"offbeat.deploy.cli.{panel.module}"
    for node in source(ROOT / "deploy" / "cli" / f"{panel.module}.py").body:
        if isinstance(node, ast.FunctionDef) and node.name == f"{command}_command":
            for each in itertools.takewhile(lambda each: isinstance(each, ast.ImportFrom), node.body[1:]):
                assert isinstance(each, ast.ImportFrom)
                yield str(each.module)
                modules = (f"{each.module}.{alias.name}" for alias in each.names)
                yield from (name for name in modules if (ROOT / Path(*name.split(".")[1:])).with_suffix(".py").is_file())


@pytest.mark.slow
def test_quick_commands_start_without_torch() -> None:
    modules = {module for command in QUICK_COMMANDS for module in imports_at_start(command)}
    assert {"offbeat.lab.audit", "offbeat.lab.simulation.predict", "offbeat.deploy.experiments.sweep_runs"} < modules
    assert slow_imports(["offbeat.deploy.cli.main", *sorted(modules)]) == []


@pytest.mark.slow
def test_a_notebook_starts_runs_without_torch() -> None:
    assert slow_imports(["offbeat", "offbeat.deploy.local.notebook"]) == []


def test_import_of_the_package_loads_none_of_its_dependencies() -> None:
    # Every reward process imports it.
    program = "import sys; before = set(sys.modules); import offbeat; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    ours = {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names}
    light = (
        "actor",
        "actor.judges",
        "actor.judges.asking",
        "actor.rewards",
        "actor.rewards.samples",
        "common",
        "common.errors",
        "common.formats",
        "protocols",
        "protocols.text",
    )
    assert ours <= {"offbeat", *(f"offbeat.{name}" for name in light)}
    assert "asyncio" not in loaded


def test_every_module_says_what_it_is_about() -> None:
    assert [name_of(path) for path in MODULES if not ast.get_docstring(source(path))] == []


def test_no_module_is_named_after_one_of_the_standard_library() -> None:
    own_names = {path.stem if path.stem != "__init__" else path.parent.name for path in MODULES}
    assert own_names & sys.stdlib_module_names == set()


def test_tests_are_no_packages_and_their_names_are_unique() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__main__.py")]
    assert len({path.name for path in tests}) == len(tests)
    assert "__init__.py" not in {path.name for path in tests}


SLIVER_LINES = 80
SLIVERS = {}
"""Files of at most `SLIVER_LINES` with one importer, and why each is no part of it."""


def modules_imported(path: Path) -> set[Path]:
    """Return the modules of this project that a module imports."""
    found: set[Path] = set()
    for name in imported(path):
        first, *parts = name.split(".")
        if first == "offbeat":
            whole, folder = ROOT.joinpath(*parts).with_suffix(".py"), ROOT.joinpath(*parts[:-1]).with_suffix(".py")
            found |= {module for module in (whole, folder) if module.is_file() and module != path}
    return found


def test_file_of_few_lines_has_two_importers() -> None:
    importers: dict[Path, set[Path]] = {path: set() for path in MODULES}
    for path in MODULES:
        for module in modules_imported(path):
            importers[module].add(path)
    slivers = {
        name_of(path)
        for path, users in importers.items()
        if len(users) == 1 and path.name != "__init__.py" and len(path.read_text().splitlines()) <= SLIVER_LINES
    }
    assert slivers == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    left = {path: modules_imported(path) for path in MODULES}
    while free := [path for path, modules in left.items() if not modules & left.keys()]:
        for path in free:
            del left[path]
    assert [name_of(path) for path in left] == []
