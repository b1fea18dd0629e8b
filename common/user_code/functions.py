"""Functions that a setting names as `module:function`: loaded, and hashed with all source files that they are made of.

Rewards, losses, environments and sources of prompts are such functions. Source files are found by reading imports, without
running any of them.
"""

import ast
import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.common.errors import SettingError, one_line
from offbeat.protocols.text import plain

MAX_HASHES = 256
"""Most files that `hash_sources` returns."""
OWN_PACKAGE = "offbeat"
_WITHOUT_EFFECT = ("kind", "type_comment")
"""Fields of syntax trees that change nothing: the `u` of `u"text"`, and comments."""


def is_function(value: str) -> bool:
    """Return whether a setting that may hold something else names a function: `module:function`."""
    return re.fullmatch(r"[\w.]+:\w+", value) is not None


def load_function(path: str, *, setting: str, parameters: Sequence[str] | None = None) -> Callable[..., Any]:
    """Import the function that `module:function` names; the current folder is on the import path.

    Raise `SettingError` about `setting` when there is none, or when it cannot be called with these parameters in order (None:
    the caller looks at its parameters).
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module_name, _, function_name = path.partition(":")
    if module_name == "__main__":
        problem = "a function of a notebook or of the main script cannot be imported by the processes that call it"
        raise SettingError(setting, path, problem, f"Put it into a file, my_code.py, and name it my_code:{function_name}.")
    try:
        module = importlib.import_module(module_name)
    # Importing runs the user's code, which may also call `sys.exit`: that must not end this program without a word.
    except (Exception, SystemExit) as error:
        problem, cure = _import_problem(error, module_name)
        raise SettingError(setting, path, problem, cure) from error
    function = vars(module).get(function_name)
    if function is None:
        raise SettingError(setting, path, f"{module.__file__} has no {function_name!r}", "Correct the name.")
    if not callable(function):
        raise SettingError(setting, path, f"{function_name!r} is of type {type(function).__name__}", "Name a function.")
    if parameters is not None and not takes(function, len(parameters)):
        problem = f"{function_name}{inspect.signature(function)} cannot take ({', '.join(parameters)})"
        raise SettingError(setting, path, problem, "Give it these parameters.")
    return function


@contextmanager
def mistakes_of(setting: str, path: str) -> Iterator[None]:
    """Raise `SettingError` for whatever the user's function, which a setting names, raises in this context."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise SettingError(setting, path, f"it raised {located(error)}", "Correct the function.") from error


def located(error: BaseException) -> str:
    """Return the type and the message of an error, and the file and line that raised it, or that cannot be parsed."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{plain(f'{type(error).__name__}: {error.msg}', 300)} ({error.filename}:{error.lineno})"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(error)} ({frame.filename}:{frame.lineno})"


def _import_problem(error: BaseException, module_name: str) -> tuple[str, str]:
    """Return why a module cannot be imported, and what to do."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{module_name}.".startswith(f"{missing}."):
        cure = "Name it as module:function."
        if module_name.endswith(".py"):
            cure = f"Name the module as an import does, without the suffix: {module_name.removesuffix('.py')}:function."
        return f"there is no module {missing!r} in {Path.cwd()}, and none installed", cure
    problem = f"importing it raised {located(error)}"
    if missing:
        return problem, f"Install {missing!r} in the environment of offbeat ({sys.prefix}), or correct the import."
    return problem, "Correct the module."


def takes(function: Callable[..., Any], num_arguments: int) -> bool:
    """Return whether a function can be called with so many arguments in order."""
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True


class _Module(NamedTuple):
    name: str
    """Dotted name by which it is imported."""
    root: Path
    """Folder on the import path in which it lies."""
    file: Path


def find_sources(path: str) -> dict[str, Path]:
    """Return the files that `module:function` is made of, by their path below the folder of the import path; empty for none.

    They are the module's own, and those of all modules that it imports from the same folder, directly or through others. Of an
    installed module, only those of its own package count: the software's version stands for the rest. An import that only
    happens by name at run time (`importlib`) is not seen.
    """
    name = path.partition(":")[0]
    roots = [Path(folder) for folder in ("", *sys.path)]
    first = next((module for root in roots if (module := _find(name, root)) is not None), None)
    if first is None:
        return {}
    installed = {Path(folder).resolve() for folder in sysconfig.get_paths().values()}
    is_installed = first.root.resolve() in installed or not {"site-packages", "dist-packages"}.isdisjoint(first.root.parts)
    package = name.partition(".")[0] if is_installed else ""
    found: dict[str, Path] = {}
    waiting = [first]
    while waiting:
        module = waiting.pop()
        key = module.file.relative_to(module.root).as_posix()
        if key in found:
            continue
        found[key] = module.file
        names = [name for imported in (module.name, *_imports(module)) for name in _with_parents(imported)]
        wanted = (name for name in dict.fromkeys(names) if not package or name.partition(".")[0] == package)
        waiting += [imported for name in wanted if (imported := _find(name, module.root)) is not None]
    return found


def hash_sources(path: str) -> dict[str, str]:
    """Return a hash of each file that `module:function` is made of, as `find_sources` finds and names them, its own file first.

    Copies of a file that do the same have the same hash: line ends, comments, layout and quotes do not count, and another
    release of Python makes no difference. Docstrings do count, because environments show those of tools to the model. Empty for
    a built-in function and for one of offbeat's own, which the software's version stands for.
    """
    if ":" not in path or path.partition(".")[0].partition(":")[0] == OWN_PACKAGE:
        return {}
    sources = find_sources(path)
    names = list(sources)
    return {name[-256:]: _hash_code(sources[name].read_bytes()) for name in [*names[:1], *sorted(names[1:])][:MAX_HASHES]}


def _hash_code(source: bytes) -> str:
    """Return a hash of what a module does; of its bytes where they are no Python."""
    digest = hashlib.sha256()
    try:
        waiting: list[object] = [ast.parse(source)]
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest()[:16]
    # Without recursion: a long sum is a deep tree. Lengths before parts make the text unambiguous.
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.AST):
            # Releases of Python differ in empty fields.
            fields = [
                field for field in ast.iter_fields(part) if field[0] not in _WITHOUT_EFFECT and field[1] not in (None, [])
            ]
            digest.update(f"{type(part).__name__} {len(fields)} ".encode())
            waiting += [item for name, value in reversed(fields) for item in (value, name)]
        elif isinstance(part, list):
            digest.update(f"{len(part)} ".encode())
            waiting += reversed(part)
        else:
            digest.update(f"{part!r} ".encode(errors="backslashreplace"))
    return digest.hexdigest()[:16]


def _find(name: str, root: Path) -> _Module | None:
    place = Path(root, *name.split("."))
    for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
        if file.is_file():
            return _Module(name, root, file)
    return None


def _imports(module: _Module) -> Iterator[str]:
    """Yield the names of the modules that a module imports, and of what it imports from them, which may be modules too."""
    try:
        tree = ast.parse(module.file.read_bytes())
    except SyntaxError:
        # Whoever imports it will be told.
        return
    parts = module.name.split(".")
    package = parts if module.file.name == "__init__.py" else parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            # `from . import helpers` in a module without a package names no module but `helpers`.
            yield from (".".join(names) for names in (base, *([*base, alias.name] for alias in node.names)) if names)


def _with_parents(name: str) -> Iterator[str]:
    """Yield a module's name, and those of the packages it is in, whose files run before its own."""
    parts = name.split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))
