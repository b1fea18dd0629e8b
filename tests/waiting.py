"""Waiting for what other threads and processes bring about."""

import time
from collections.abc import Callable


def wait_for(claim: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Return as soon as the claim holds; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
