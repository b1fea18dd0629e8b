"""The address that a file holds, and what a learner writes there."""

import socket
from pathlib import Path

import pytest

from offbeat.protocols.addresses import address_file, find_address, reachable
from offbeat.protocols.channels import Hub


def test_address_is_itself_or_what_its_file_says_now(tmp_path: Path) -> None:
    file = tmp_path / "hub.address"
    setting = f"file:{file}"
    assert address_file("tcp://h:1") is None
    assert address_file(setting) == file
    assert find_address("tcp://h:1") == "tcp://h:1"
    assert find_address(setting) is None
    file.write_text("")
    assert find_address(setting) is None
    for address in ("tcp://a:1", "tcp://b:2"):
        file.write_text(f"{address}\n")
        assert find_address(setting) == address


def test_address_file_that_is_a_folder_is_no_missing_one(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        find_address(f"file:{tmp_path}")


def test_hub_is_reachable_at_the_port_that_was_bound() -> None:
    with Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 20) as hub:
        host, _, port = reachable(hub.address).rpartition(":")
        assert (host, int(port) > 0) == ("tcp://127.0.0.1", True)


@pytest.mark.parametrize("bound", ["tcp://0.0.0.0:5700", "tcp://[::]:5700"])
def test_hub_of_all_interfaces_is_reachable_by_its_machines_name(bound: str) -> None:
    assert reachable(bound) == f"tcp://{socket.gethostname()}:5700"
