"""A forked process that goes on as if it had been started as another program."""

import runpy
import sys
import traceback
from collections.abc import Sequence


def run_module(module: str, arguments: Sequence[str]) -> int:
    """Run `python -m MODULE ARGUMENTS` in this process; return its exit status."""
    sys.argv = ["", *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001, the interpreter's last resort
        traceback.print_exc()
        return 1
    return 0
