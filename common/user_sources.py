"""The source files of the user's functions, found by reading imports, without running any of them."""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


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
    package = name.partition(".")[0] if _is_installed(first.root) else ""
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
            yield from (".".join([*base, *names]) for names in ([], *([alias.name] for alias in node.names)))


def _with_parents(name: str) -> Iterator[str]:
    """Yield a module's name, and those of the packages it is in, whose files run before its own."""
    parts = name.split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _is_installed(root: Path) -> bool:
    installed = {Path(folder).resolve() for folder in sysconfig.get_paths().values()}
    return root.resolve() in installed or not {"site-packages", "dist-packages"}.isdisjoint(root.parts)
