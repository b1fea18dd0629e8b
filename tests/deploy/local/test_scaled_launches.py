"""The launcher has as many actors as the run wants."""

import signal
import threading
from pathlib import Path
from typing import cast

import msgspec
import pytest

from offbeat.common.processes import process_table as processes
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.run_folder import PROGRAM_LOGS
from offbeat.common.settings.config import Config, HubSection, LaunchSection, RunSection
from offbeat.common.settings.loading import load
from offbeat.deploy.local import launcher
from offbeat.deploy.local.forks import Starts
from offbeat.deploy.local.launcher import Launcher
from offbeat.deploy.local.starts import ProcessStart
from offbeat.deploy.operating.link import open_link_to
from offbeat.deploy.operating.set import tune
from offbeat.protocols.messages import MemberStatus
from tests.deploy.local.warm import ForkedProcess, WarmProcess
from tests.deploy.operating.operator_desk import REPORT
from tests.deploy.services import SERVICES_S, SLOW_REWARD, services_in, write_config


class ListedProcess:
    """A process that is a state."""

    def __init__(self) -> None:
        self.ended_with: int | None = None
        self.is_asked = False

    def status(self) -> int | None:
        return self.ended_with

    def ask_to_stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.is_asked = True

    def kill(self) -> None:
        self.ended_with = self.ended_with if self.ended_with is not None else -signal.SIGKILL


class ListedStarts:
    """Processes by the actor's name, the newest of each."""

    def __init__(self) -> None:
        self.of: dict[str, ListedProcess] = {}

    def prepare(self) -> None:
        pass

    def start(self, start: ProcessStart) -> ListedProcess:
        name = start.arguments[3].split('"')[1]
        assert start.log is not None
        start.log.touch()
        self.of[name] = ListedProcess()
        return self.of[name]

    def close(self) -> None:
        pass

    def there(self) -> set[str]:
        return {name for name, process in self.of.items() if process.ended_with is None and not process.is_asked}


class Bench:
    """A launcher of one actor whose processes are listed."""

    def __init__(self, folder: Path) -> None:
        (folder / PROGRAM_LOGS).mkdir()
        config = Config(
            run=RunSection(dir=str(folder)),
            hub=HubSection(address="tcp://127.0.0.1:5700"),
            launch=LaunchSection(num_actors=1, max_restarts=0),
        )
        self.starts = ListedStarts()
        self.launcher = Launcher(config, StopRequest(), cast(Starts, self.starts))
        self.launcher._add_actor(0)

    def follow(self, wanted: int, *members: str) -> set[str]:
        """Show the launcher a report; return the actors that are there and were not asked to leave."""
        there = tuple(MemberStatus(name, "working", 6, 3, 4, 0.0, 0.2, "vllm 1") for name in members)
        self.launcher._follow(msgspec.structs.replace(REPORT, actors_wanted=wanted, members=there))
        return self.starts.there()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_actors_are_started_and_the_newest_asked_to_leave(bench: Bench) -> None:
    assert bench.follow(3) == {"actor-0", "actor-1", "actor-2"}
    assert bench.follow(1, "actor-0", "actor-1", "actor-2") == {"actor-0"}
    assert [bench.starts.of[name].is_asked for name in ("actor-0", "actor-1", "actor-2")] == [False, True, True]


def test_name_is_used_again_only_when_nobody_has_it(bench: Bench) -> None:
    bench.follow(2)
    bench.follow(1, "actor-0", "actor-1")
    # actor-1 is leaving, and a user's actor is named actor-2.
    assert bench.follow(2, "actor-0", "actor-1", "actor-2") == {"actor-0", "actor-3"}
    bench.starts.of["actor-1"].ended_with = 0
    bench.follow(2, "actor-0", "actor-2", "actor-3")
    assert bench.follow(3, "actor-0", "actor-2", "actor-3") == {"actor-0", "actor-1", "actor-3"}


def test_actor_that_left_by_itself_is_replaced_while_the_run_goes_on(bench: Bench) -> None:
    bench.starts.of["actor-0"].ended_with = 0
    assert bench.follow(0) == set()
    assert bench.follow(1) == {"actor-0"}


def test_later_actor_that_cannot_be_kept_is_given_up_until_the_number_changes(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.follow(2)
    bench.starts.of["actor-1"].ended_with = 1
    bench.launcher._keep_actor(1)
    assert "The run continues without it" in caplog.text
    assert bench.follow(2, "actor-0") == {"actor-0"}
    assert bench.follow(3, "actor-0") == {"actor-0", "actor-1", "actor-2"}


def test_run_ends_with_a_first_actor_that_cannot_be_kept(bench: Bench) -> None:
    bench.starts.of["actor-0"].ended_with = 1
    with pytest.raises(launcher.LaunchError, match="actor-0 ended with exit status 1"):
        bench.launcher._keep_actor(0)


class WarmStart:
    """A forked process, as the launcher sees it."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process

    def status(self) -> int | None:
        return self._process.poll()

    def ask_to_stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        processes.kill_group(self._process.pid)
        self._process.wait()


class WarmStarts(ListedStarts):
    """Forks services from the tests' warm process."""

    def __init__(self, warm: WarmProcess, folder: Path) -> None:
        self._warm = warm
        self._folder = folder

    def start(self, start: ProcessStart) -> WarmStart:  # pyright: ignore[reportIncompatibleMethodOverride]
        with (start.log or self._folder / "learner.log").open("ab") as log:
            return WarmStart(self._warm.start(start.arguments, self._folder, log.fileno(), log.fileno()))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(SERVICES_S)
def test_run_gets_an_actor_more_and_one_less_while_it_trains_and_no_lease_is_lost(
    tmp_path: Path, tiny_model: Path, warm: WarmProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "end_run", lambda *_: None)
    # It ends with the thread that starts it.
    warm.launch()
    with services_in(tmp_path, warm) as services:
        path = write_config(
            tmp_path,
            tiny_model,
            run={"dir": str(tmp_path / "run")},
            task=SLOW_REWARD,
            train={"num_steps": 10_000},
            actor={"engine": "transformers", "engine_options": {}},
        )
        config, stop = load(Path(path)), StopRequest()
        train = threading.Thread(target=Launcher(config, stop, cast(Starts, WarmStarts(warm, tmp_path))).run)
        train.start()
        try:
            services.wait_for(lambda: bool(services.rows("run", "step")), "a step")
            wants(config, 2)
            services.wait_for(lambda: "actor-1" in {row["actor"] for row in services.rows("run", "group")}, "its groups")
            wants(config, 1)
            services.wait_for(lambda: ("actor_left", "actor-1") in services.events("run"), "its leave")
        finally:
            stop.ask("the test is over")
            train.join()
        expired = [row["detail"] for row in services.rows("run", "event") if row["event"] == "lease_expired"]
        assert not [detail for detail in expired if "no group within" in detail]
        assert ("actor_lost", "actor-1") not in services.events("run")
        final = services.rows("run", "final")[-1]
        ledger = final["ledger"]
        assert final["outcome"] == "stopped"
        assert ledger["leased"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["expired"] + ledger["in_flight"]


def wants(config: Config, actors: int) -> None:
    assert tune(open_link_to(config.hub, "operator"), config.hub.address, {"scale.actors": str(actors)})
