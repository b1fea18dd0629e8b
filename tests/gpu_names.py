"""Names of vLLM, torch's GPU modules and DeepSpeed that the source uses, and their definitions in a package's source.

Nothing is imported: definitions are read from sources, of an installed package or of a wheel that cannot be installed here.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests/gpu_names.json"
"""The definitions in the CUDA wheels of the pins, and the differences of a newer vLLM; `.ci/read_cuda_wheels.py` writes it."""
ROOMS = ("actor", "common", "deploy", "lab", "learner")
PACKAGES = ("vllm", "deepspeed", "torch.cuda", "torch.distributed", "torch._C._distributed_c10d", "torch.nn.attention")
"""The packages whose names are looked up; the rest of torch is the same on every device."""
ROOTS = {package.partition(".")[0] for package in PACKAGES}
VALUES = {
    ("actor/engines/vllm_engine.py", "self._engine"): "vllm.v1.engine.llm_engine.LLMEngine",
    ("actor/engines/vllm_engine.py", "self._engine.engine_core"): "vllm.v1.engine.core_client.EngineCoreClient",
    ("actor/engines/vllm_engine.py", "arguments"): "vllm.engine.arg_utils.EngineArgs",
    ("actor/engines/vllm_worker.py", "self.model_runner"): "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
}
"""Classes of expressions, by file, whose methods are looked up too."""
ALSO = (
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.reload_weights",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.get_model",
    "vllm.v1.worker.gpu_worker.Worker.reload_weights",
    "vllm.v1.engine.input_processor.InputProcessor.assign_request_id",
    "vllm.v1.engine.input_processor.InputProcessor.process_inputs",
    "vllm.v1.engine.output_processor.OutputProcessor.add_request",
    "vllm.v1.engine.output_processor.OutputProcessor.request_states",
    "vllm.v1.engine.core.EngineCore.batch_queue",
    "vllm.v1.engine.core.EngineCore.pause_scheduler",
    "vllm.v1.engine.core.EngineCore.resume_scheduler",
    "vllm.platforms.interface.Platform.device_type",
    "vllm.platforms.interface.Platform.is_cpu",
    "vllm.outputs.CompletionOutput",
    "vllm.outputs.RequestOutput",
)
"""Names that are used without standing in the source: the older model runner, and classes of objects that vLLM returns."""

IN_NO_STUB = {"torch.distributed.ProcessGroupGloo._Options"}
"""Names of compiled code that its stub leaves out; the tests on CPUs use them."""


class Use(NamedTuple):
    """A name as a module uses it."""

    name: str
    place: str
    """`path:line`."""
    keywords: tuple[str, ...] = ()
    """The keywords of the call."""


class Source(Protocol):
    """The files of a package."""

    def read(self, path: str) -> str | None:
        """Return the text of a file, None where there is none."""
        ...


class Folder:
    """Installed packages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, path: str) -> str | None:
        file = self._folder / path
        return file.read_text(encoding="utf-8") if file.is_file() else None


def read_pins() -> dict[str, str]:
    """Return the versions in constraints.txt of the packages whose wheels depend on the GPU."""
    lines = re.findall(r"^(deepspeed|torch|vllm)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return dict(lines)


def read_range() -> str:
    """Return the versions of vLLM that pyproject.toml allows on a GPU."""
    (line,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cuda"]
    return line.removeprefix("vllm")


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return a line for each name that is gone, new, or defined otherwise: by which parameters or fields."""
    lines = [f"gone: {name}" for name in sorted(before.keys() - after.keys())]
    lines += [f"new: {name} {after[name]}" for name in sorted(after.keys() - before.keys())]
    for name in sorted(before.keys() & after.keys()):
        was, now = _words(before[name]), _words(after[name])
        if before[name] != after[name]:
            changes = [f"-{word}" for word in was if word not in now] + [f"+{word}" for word in now if word not in was]
            lines.append(f"changed: {name}: {' '.join(changes) or 'another order'}")
    return lines


def losses(lines: Iterable[str]) -> list[str]:
    """Return the lines of `differences` by which a name is gone, or a parameter or field that the source has a word for."""
    ours = {word for path in _files() for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    found = []
    for line in lines:
        was, now = ({word[1:].rstrip("=") for word in line.split() if word[0] == sign} for sign in "-+")
        if line.startswith("gone: ") or (was - now) & ours:
            found.append(line)
    return found


def _words(definition: str) -> list[str]:
    return re.findall(r"[^\s(),;]+", definition)


def find_uses() -> list[Use]:
    """Return every use in the source, and the names in `ALSO`."""
    uses = [use for path in _files() for use in _uses_in(path) if use.name not in IN_NO_STUB]
    return uses + [Use(name, "tests/gpu_names.py") for name in ALSO]


def _files() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def _uses_in(path: Path) -> Iterator[Use]:
    text, place = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    if not any(root in text for root in ROOTS):
        return
    nodes = list(ast.walk(ast.parse(text)))
    names = {text: owner for (file, text), owner in VALUES.items() if file == place}
    for node in nodes:
        match node:
            case ast.Import(names=aliases):
                names |= {
                    alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
                    for alias in aliases
                }
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                names |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in aliases}
                yield from (Use(f"{module}.{alias.name}", f"{place}:{node.lineno}") for alias in aliases if _is_ours(module))
    names = {text: owner for text, owner in names.items() if owner.partition(".")[0] in ROOTS}
    if not names:
        return
    calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name) and (name := _resolve(node, names)) is not None:
            call = calls.get(id(node))
            keywords = tuple(one.arg for one in call.keywords if one.arg) if call else ()
            yield Use(name, f"{place}:{node.lineno}", keywords)


def _resolve(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """Return the dotted name that an expression stands for, None where it is none of these packages."""
    root = node
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name) or not any(name.partition(".")[0] == root.id for name in names):
        return None
    text = ast.unparse(node)
    known = max((prefix for prefix in names if text == prefix or text.startswith(prefix + ".")), key=len, default=None)
    if known is None:
        return None
    name = names[known] + text.removeprefix(known)
    return name if _is_ours(name) and name not in PACKAGES else None


def _is_ours(name: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in PACKAGES)


class Definitions:
    """Definitions in a source, each file parsed once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._parsed: dict[str, ast.Module | None] = {}

    def describe(self, name: str) -> str:
        """Return the definition of a dotted name as text: parameters, fields, or its kind; raise `LookupError` for none."""
        found = self._find(name, set())
        if found is None:
            raise LookupError(name)
        return found

    def _find(self, name: str, seen: set[str]) -> str | None:
        if name in seen:
            return None
        seen.add(name)
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            module = ".".join(parts[:cut])
            if (file := self._module(module)) is not None:
                path, tree = file
                return self._in_body(tree.body, parts[cut:], module, path, seen) if parts[cut:] else "module"
        return None

    def _module(self, name: str) -> tuple[str, ast.Module] | None:
        stem = name.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py", f"{stem}.pyi"):
            if path not in self._parsed:
                text = self._source.read(path)
                self._parsed[path] = None if text is None else ast.parse(text)
            if (tree := self._parsed[path]) is not None:
                return path, tree
        return None

    def _in_body(self, body: list[ast.stmt], parts: list[str], module: str, path: str, seen: set[str]) -> str | None:
        """Return the definition of the first part, or of what follows it, in a module's or class's statements."""
        name, rest = parts[0], parts[1:]
        statements = list(_flat(body))
        functions = [one for one in statements if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == name]
        if functions:
            return "; ".join(_parameters(one) for one in functions if not _is_setter(one))
        for statement in statements:
            match statement:
                case ast.ClassDef() if statement.name == name:
                    return self._in_class(statement, rest, module, path, seen)
                case ast.AnnAssign(target=ast.Name(id=target) | ast.Attribute(attr=target)) if target == name:
                    return "value"
                case ast.Assign(targets=targets) if any(_target(one) == name for one in targets):
                    return "value" if not rest else self._member_of_value(statement.value, rest, module, path, seen)
                case ast.ImportFrom() if not rest or not _is_class_body(body):
                    if (found := self._imported(statement, parts, module, path, seen)) is not None:
                        return found
                case ast.Import(names=aliases) if any((one.asname or one.name) == name for one in aliases):
                    return self._find(".".join(parts), seen)
        return self._lazy(statements, parts, module, seen)

    def _in_class(self, node: ast.ClassDef, rest: list[str], module: str, path: str, seen: set[str]) -> str | None:
        if rest:
            found = self._in_body(node.body, rest, module, path, seen) or _set_in_methods(node, rest[0])
            bases = [self._find(f"{module}.{ast.unparse(base)}.{'.'.join(rest)}", seen) for base in node.bases if not found]
            return found or next(filter(None, bases), None)
        made = [one for one in _flat(node.body) if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        if made:
            return "class " + "; ".join(_parameters(one) for one in made)
        fields = [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
        return f"class ({', '.join(fields)})"

    def _member_of_value(self, value: ast.expr, rest: list[str], module: str, path: str, seen: set[str]) -> str | None:
        """Return the definition of a member of a value that is an alias, or the call of a class."""
        owner = value.func if isinstance(value, ast.Call) else value
        return self._find(f"{module}.{ast.unparse(owner)}.{'.'.join(rest)}", seen)

    def _imported(self, node: ast.ImportFrom, parts: list[str], module: str, path: str, seen: set[str]) -> str | None:
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        origin = ".".join(filter(None, [package, node.module])) if node.level else node.module or ""
        for alias in node.names:
            if alias.name == "*":
                if (found := self._find(".".join([origin, *parts]), seen)) is not None:
                    return found
            elif (alias.asname or alias.name) == parts[0]:
                return self._find(".".join([origin, alias.name, *parts[1:]]), seen)
        return None

    def _lazy(self, statements: list[ast.stmt], parts: list[str], module: str, seen: set[str]) -> str | None:
        """Return the definition of a name that a package imports or makes on its first use."""
        for statement in statements:
            match statement:
                case ast.FunctionDef(name="__getattr__") if _mentions(statement, parts[0]) and not parts[1:]:
                    return "value"
                case ast.Assign(targets=[ast.Name(id="MODULE_ATTRS")], value=ast.Dict() as table):
                    found: str | None = ast.literal_eval(table).get(parts[0])
                    if found is not None:
                        return self._find(".".join([module + found.replace(":", "."), *parts[1:]]), seen)
        return None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those in `if` and `try` too."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _flat([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            yield from _flat([*statement.body, *(one for handler in statement.handlers for one in handler.body)])


def _mentions(node: ast.AST, text: str) -> bool:
    return any(isinstance(one, ast.Constant) and one.value == text for one in ast.walk(node))


def _is_class_body(body: list[ast.stmt]) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.args.args and one.args.args[0].arg == "self" for one in body)


def _is_setter(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "setter" for one in node.decorator_list)


def _target(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _set_in_methods(node: ast.ClassDef, name: str) -> str | None:
    targets = (target for one in ast.walk(node) if isinstance(one, ast.Assign) for target in one.targets)
    annotated = (one.target for one in ast.walk(node) if isinstance(one, ast.AnnAssign))
    return "value" if any(ast.unparse(target) == f"self.{name}" for target in [*targets, *annotated]) else None


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a function's parameters without annotations; those with a default are marked by `=`."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    words = [one.arg + "=" * (index >= num_required) for index, one in enumerate(positional) if one.arg not in ("self", "cls")]
    words += [f"*{arguments.vararg.arg}"] if arguments.vararg else ["*"] * bool(arguments.kwonlyargs)
    words += [
        one.arg + "=" * (default is not None) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    words += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return f"({', '.join(words)})"
