"""Functions that a setting names as `module:function`: rewards, losses, sources of prompts."""

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offbeat.common.errors import SettingError, one_line


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
        raise SettingError(setting, path, f"{function_name!r} is a {type(function).__name__}", "Name a function.")
    if parameters is not None and not _takes(function, len(parameters)):
        problem = f"{function_name}{inspect.signature(function)} cannot take ({', '.join(parameters)})"
        raise SettingError(setting, path, problem, "Give it these parameters.")
    return function


def located(error: BaseException) -> str:
    """Return the type and the message of an error, and the file and line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(error)} ({frame.filename}:{frame.lineno})"


def _import_problem(error: BaseException, module_name: str) -> tuple[str, str]:
    """Return why a module cannot be imported, and what to do."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{module_name}.".startswith(f"{missing}."):
        return f"there is no module {missing!r} in {Path.cwd()}, and none installed", "Name it as module:function."
    problem = f"importing it raised {located(error)}"
    if missing:
        return problem, f"Install {missing!r} in the environment of offbeat ({sys.prefix}), or correct the import."
    return problem, "Correct the module."


def _takes(function: Callable[..., Any], num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True
