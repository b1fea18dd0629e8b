"""Claims about the text of addresses: only what surely stays on this machine counts as loopback."""

import pytest

from offbeat.protocols.addresses import host_of, is_loopback


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://127.0.0.1:5700", "127.0.0.1"),
        ("tcp://learner.example:5700", "learner.example"),
        ("tcp://*:5700", "0.0.0.0"),
        ("tcp://[::1]:5700", "::1"),
    ],
)
def test_host_of_address(address: str, host: str) -> None:
    assert host_of(address) == host


@pytest.mark.parametrize(
    ("address", "is_so"),
    [
        ("tcp://127.0.0.1:5700", True),
        ("tcp://127.1.2.3:5700", True),
        ("tcp://localhost:5700", True),
        ("tcp://[::1]:5700", True),
        ("tcp://*:5700", False),
        ("tcp://0.0.0.0:5700", False),
        ("tcp://[::]:5700", False),
        ("tcp://lo:5700", False),
        ("tcp://localhost.example.org:5700", False),
        ("tcp://127.0.0.1.example.org:5700", False),
    ],
)
def test_only_what_surely_is_loopback_is_taken_for_it(address: str, is_so: bool) -> None:
    assert is_loopback(address) is is_so
