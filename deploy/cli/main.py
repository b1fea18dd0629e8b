"""The command line `offbeat`: finds the module of a command in `deploy/cli/` and imports only that one."""

import ast
import importlib
import importlib.metadata
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

from offbeat.common.errors import LostProcessError, ServiceError, SettingError
from offbeat.common.processes.environment import prepare_environment
from offbeat.common.processes.files import limit_reached, open_standard_streams, raise_limit
from offbeat.common.processes.shutdown import GAVE_UP_STATUS, PARENT_VARIABLE, USER_ERROR_STATUS, die_with_parent, end_process
from offbeat.protocols.addresses import ChannelError
from offbeat.protocols.text import plain


class Panel(NamedTuple):
    """Commands that `offbeat --help` lists together, and whose functions are in one module."""

    module: str
    title: str
    commands: tuple[str, ...]


PANELS = (
    Panel("start", "Run a config", ("train", "demo", "learner", "actor")),
    Panel("prepare", "Before a run", ("check", "explain", "environments", "new", "calibrate", "keygen")),
    Panel("operate", "Operate a RUN", ("status", "set", "scale")),
    Panel("read", "Read a RUN", ("report", "runs", "compare", "samples", "trace", "drift", "audit", "export", "serve")),
    Panel("experiment", "Compare settings", ("simulate", "replay", "sweep")),
    Panel("cluster", "On a cluster", ("deploy", "reconcile")),
)
"""The commands in the order of `offbeat --help`."""
GROUPS = ("deploy",)
"""Commands that have commands of their own: their module's `app`."""


class LazyCommands(TyperGroup):
    """A group of commands that are imported when they run, or when their own help is asked for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the name of the command that `args` begin with, the imported command, and the other arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load_command(str(name)), rest


def make_app() -> typer.Typer:
    """Return the application: every command by name and help text, none of them imported."""
    app = typer.Typer(
        cls=LazyCommands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Train language models with asynchronous reinforcement learning.",
        epilog="To describe every setting, run: offbeat explain",
    )
    app.callback()(_options)
    for panel in PANELS:
        for name, help_text in _help_texts(panel).items():
            app.command(name, help=help_text, rich_help_panel=panel.title)(_placeholder)
    return app


def main() -> None:
    """Run the command line, and end the process with it."""
    try:
        run()
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        end_process(end.code or 0)


def run(app: typer.Typer | None = None) -> None:
    """Run the command line, or another application like it.

    Errors that the user can mend become one line on stderr and exit status 2, without a traceback.
    """
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A terminal without UTF-8 has no dashes, and not every letter of a model. As for stderr, they are escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Local modules (rewards named by import path) are found as `python -m` would find them.
    sys.path.insert(0, "")
    # Removed from the environment: it is not meant for what this process starts.
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        die_with_parent(int(parent))
    raise_limit()
    try:
        (app or make_app())()
    except SettingError as error:
        _fail(error.texts, USER_ERROR_STATUS)
    except ChannelError as error:
        _fail((str(error),), USER_ERROR_STATUS)
    except LostProcessError as error:
        _fail((str(error),), 1)
    except ServiceError as error:
        _fail((str(error),), GAVE_UP_STATUS)
    except Exception as error:
        if not _has_current_folder():
            _fail(("the current folder was deleted: change to another one",), USER_ERROR_STATUS)
        limit = limit_reached(error) if isinstance(error, OSError) else None
        if limit is not None:
            _fail((f"{error}: raise the limit on {limit}",), GAVE_UP_STATUS)
        for file in sorted(Path.cwd().glob("*.py")):
            if file.stem not in sys.stdlib_module_names:
                continue
            print(
                f"note: {file} hides Python's own module of this name. If the error below is about it, rename the file.",
                file=sys.stderr,
            )
        raise


def _has_current_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _fail(texts: tuple[str, ...], status: int) -> None:
    for text in texts:
        # Line by line: the text may quote a log.
        print("error:", "\n".join(plain(line) for line in text.splitlines()), file=sys.stderr)
    sys.exit(status)


def _print_version(is_asked_for: bool) -> None:
    if is_asked_for:
        typer.echo(f"offbeat {importlib.metadata.version('offbeat')}")
        raise typer.Exit


def _load_command(name: str) -> Any:
    """Import a command's module and return the command as Typer makes it."""
    panel = next(panel for panel in PANELS if name in panel.commands)
    module = importlib.import_module(f"offbeat.deploy.cli.{panel.module}")
    if name in GROUPS:
        return get_command(module.app)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(getattr(module, f"{name}_command"))
    return get_command(alone)


def _help_texts(panel: Panel) -> dict[str, str]:
    """Return the docstrings of a panel's commands, read from the source: importing all of them would take seconds."""
    tree = ast.parse(Path(__file__).with_name(f"{panel.module}.py").read_text(encoding="utf-8"))
    texts = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {name: texts[f"{name}_command"] for name in panel.commands}


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `offbeat` itself."""


def _placeholder() -> None:
    """Stand for a command that is not imported; `LazyCommands` runs the imported one instead."""
    raise AssertionError("the placeholder of a command was called")


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # An engine (tensor parallelism) or the reward pool spawned this process; it imports this module before anything else.
    prepare_environment()
