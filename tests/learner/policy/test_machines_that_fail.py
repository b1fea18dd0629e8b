"""Learner ranks on two machines: a wrong port, address or interface, a dead process and a cut cable each end in a sentence."""

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch
import torch.distributed as dist

from offbeat.common.errors import LostProcessError, SettingError
from offbeat.common.records import logs
from offbeat.learner.policy import process_group
from offbeat.learner.training.ranks import naming_lost_ranks
from tests.deploy.machines_apart import Machines, cut_cable, move_to, two_machines
from tests.forked import context

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
PORT = 29500
Rank = tuple[BaseProcess, Connection]


class Lines(logging.Handler):
    """Sends each line of the log to the test."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        self._connection.send(record.getMessage())


def run_rank(prefix: Sequence[str], variables: dict[str, str], limits: dict[str, float], connection: Connection) -> None:
    """Join the process group and broadcast until that fails; send what a user reads, and "joined" and "ended"."""
    move_to(prefix)
    os.environ.update(variables)
    logs.STILL_S = 0.5
    for name, limit in limits.items():
        setattr(process_group, name, limit)
    process_group.logger.addHandler(Lines(connection))
    process_group.logger.setLevel(logging.INFO)
    try:
        with naming_lost_ranks():
            process_group.join_process_group()
            connection.send("joined")
            while True:
                dist.broadcast(torch.zeros(1), src=0)
                time.sleep(0.05)
    except (LostProcessError, SettingError) as error:
        connection.send(str(error))
    connection.send("ended")


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with two_machines() as found:
        if not found.are_apart:
            pytest.skip("the kernel lets users make no namespaces")
        yield found


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    started: list[Rank] = []
    yield started
    for process, _ in started:
        process.kill()
        process.join()


def start(ranks: list[Rank], machines: Machines, rank: int, limits: dict[str, float] | None = None, **variables: str) -> None:
    """Start a rank on the machine of its number."""
    ours, theirs = context.Pipe()
    usual = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": machines.hosts[0], "MASTER_PORT": str(PORT)}
    arguments = (machines.prefixes[rank], usual | variables, limits or {}, theirs)
    process = context.Process(target=run_rank, args=arguments, daemon=True)
    process.start()
    # Only the process holds it now, so that its death is seen here.
    theirs.close()
    ranks.append((process, ours))


def read_until(rank: Rank, last: str) -> list[str]:
    """Return what a rank says before the line `last`."""
    lines: list[str] = []
    while not lines or lines[-1] != last:
        assert rank[1].poll(PATIENCE_S), lines
        lines.append(rank[1].recv())
    return lines[:-1]


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (
            {"MASTER_ADDR": "10.77.0.1"},
            'MASTER_ADDR = "10.77.0.1": this machine has no way to it (Network is unreachable)',
        ),
        (
            {"GLOO_SOCKET_IFNAME": "eth7"},
            'GLOO_SOCKET_IFNAME = "eth7": this machine has no interface eth7, only lo, cable. Unset it, or choose',
        ),
    ],
    ids=str,
)
def test_address_and_interface_that_this_machine_cannot_use_are_named_at_once(
    variables: dict[str, str], sentence: str, machines: Machines, ranks: list[Rank]
) -> None:
    start(ranks, machines, 1, {}, **variables)
    assert read_until(ranks[0], "ended")[-1].startswith(f"environment variable {sentence}")


def test_rank_with_another_port_is_told_that_nobody_answers_while_it_waits_and_at_its_end(
    machines: Machines, ranks: list[Rank]
) -> None:
    limits = {"MEET_S": 3.0, "LOOK_S": 0.1}
    start(ranks, machines, 0, limits)
    start(ranks, machines, 1, limits, MASTER_PORT="29555")
    waited, asked = (read_until(rank, "ended") for rank in ranks)
    assert any("so far: it answers, and others have not come. Give all learner processes" in line for line in waited)
    assert any("so far: it does not answer (Connection refused). Give all learner processes" in line for line in asked)
    for port, lines in ((PORT, waited), (29555, asked)):
        setting = f'environment variables MASTER_ADDR:MASTER_PORT = "{machines.hosts[0]}:{port}"'
        assert lines[-1].startswith(f"{setting}: the learner processes did not meet there (")
        assert "Give all learner processes the same MASTER_ADDR and MASTER_PORT" in lines[-1]


def test_interface_that_does_not_lead_to_the_other_machine_is_named_on_both(machines: Machines, ranks: list[Rank]) -> None:
    for rank, interface in enumerate(("cable", "lo")):
        start(ranks, machines, rank, {"CONNECT_S": 0.4}, GLOO_SOCKET_IFNAME=interface)
    for rank, interface in zip(ranks, ("cable", "lo"), strict=True):
        sentence = read_until(rank, "ended")[-1]
        assert sentence.startswith(
            f'environment variable GLOO_SOCKET_IFNAME = "{interface}": the learner processes cannot connect'
        )
        assert "through cable of " in sentence and ", lo of " in sentence and "gloo/" not in sentence
        assert "Set it on each machine to the interface that leads to the others" in sentence


def test_dead_rank_is_noticed_by_the_other(machines: Machines, ranks: list[Rank]) -> None:
    for rank in range(2):
        start(ranks, machines, rank)
    for rank in ranks:
        read_until(rank, "joined")
    assert ranks[1][0].pid is not None
    os.kill(ranks[1][0].pid, signal.SIGKILL)
    sentence = read_until(ranks[0], "ended")[-1]
    assert sentence.startswith("another process of the learner was lost (")
    assert "GLHF" not in sentence and "run.resume=true" in sentence


def test_machine_behind_a_cut_cable_is_noticed_by_both_long_before_the_limit_of_a_collective(ranks: list[Rank]) -> None:
    with two_machines() as machines:
        if not machines.are_apart:
            pytest.skip("the kernel lets users make no namespaces")
        for rank in range(2):
            start(ranks, machines, rank, {"LOST_S": 2})
        for rank in ranks:
            read_until(rank, "joined")
        cut_cable(machines)
        for rank in ranks:
            assert read_until(rank, "ended")[-1].startswith("another process of the learner was lost (")
