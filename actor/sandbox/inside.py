"""First lines of every program in the sandbox: write its files, take its limits, run it.

It is run as a script by the bare interpreter, so it imports what is built in and nothing of this project. The standard input
is the order (eight bytes of length, then a dict by `marshal`) and then the program's own input.
"""

import marshal
import os
import resource
import sys

NAME = "main.py"


def read(length):
    """Return the next bytes of the standard input, and not one more: the rest is the program's."""
    parts = []
    while length:
        part = os.read(0, length)
        if not part:
            os._exit(1)
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def prepare():
    """Carry out the order and return the compiled program."""
    order = marshal.loads(read(int.from_bytes(read(8), "little")))
    for name, content in {**order["files"], NAME: order["code"]}.items():
        folder = os.path.dirname(name)  # noqa: PTH120, pathlib takes as long to import as the rest
        if folder:
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103
        with open(name, "wb") as file:  # noqa: PTH123
            file.write(content)
    if order["confine"]:
        names = {}
        exec(compile(order["confine_source"], "confine", "exec"), names)
        names["confine"](**order["confine"])
    for name, limit in order["limits"].items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (soft, soft))
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if path), *order["folders"]]  # noqa: PTH109
    sys.argv[:] = [NAME]
    # From here on everything is the program's: what comes before this mark is a failure of the sandbox.
    os.write(1, order["mark"])
    return order["code"]


def show(error, sys=sys):
    """Write the traceback without the lines of this file, and exit, as the interpreter would."""
    frames = error.__traceback__.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)
    sys.exit(1)


def main():
    """Run the program as the main module."""
    code = prepare()
    module = sys.modules["__main__"]
    names = vars(module)
    end = show
    for name in ("marshal", "os", "resource", "sys", "NAME", "read", "prepare", "show", "main", "__file__", "__doc__"):
        names.pop(name, None)
    try:
        exec(compile(code, "main.py", "exec", dont_inherit=True), names)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001, shown as the interpreter would show it
        end(error)


main()
