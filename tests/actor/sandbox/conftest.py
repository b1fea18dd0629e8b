"""The sandboxes of this machine: each test that takes `box` runs in all that work here."""

from functools import cache
from typing import get_args

import pytest

from offbeat.actor.sandbox import Local, NoSandboxError
from offbeat.actor.sandbox.local import BackendName


@cache
def working() -> dict[str, Local]:
    """Return the sandboxes that work here, by the name of their backend. `.ci/run` makes sure that these are all."""
    boxes = {name: Local(name) for name in get_args(BackendName)}
    return {name: box for name, box in boxes.items() if _works(box)}


def _works(box: Local) -> bool:
    try:
        box.check()
    except NoSandboxError:
        return False
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "box" in metafunc.fixturenames:
        metafunc.parametrize("box", working().values(), ids=working().keys(), scope="session")
