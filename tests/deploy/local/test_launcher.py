"""The launcher restarts services, ends the run, and leaves nothing behind; stand-ins replace the services."""

import multiprocessing
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from offbeat.common.errors import SettingError
from offbeat.common.processes.shutdown import PAUSED_STATUS, StopRequest
from offbeat.common.records.rows import StepRow
from offbeat.common.records.writer import MetricsWriter
from offbeat.common.settings.config import Config, HubSection, LaunchSection, LogSection, RunSection
from offbeat.deploy.local import launcher
from offbeat.deploy.local.launcher import Launcher, LaunchError, RestartBudget
from offbeat.deploy.local.starts import FreshStarts
from tests.common.records.test_run_folder import held_by_another_process
from tests.deploy.local.warm import WarmProcess
from tests.deploy.services import SERVICES_S, services_in, write_config
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

SERVICES = '''
"""Stands for `offbeat`: notes its start in `starts`, then does what the file `NAME.START` (or `NAME`) says."""
import os, subprocess, sys, time
from pathlib import Path

sys.argv.remove("--no-preflight")
folder = Path(sys.argv[1])
name = sys.argv[2]
if name == "actor":
    name = sys.argv[4].split('"')[1]
elif int(os.environ["RANK"]):
    name = "learner-" + os.environ["RANK"]
with (folder / "starts").open("a") as file:
    print(name, os.getpid(), os.environ["WORLD_SIZE"] if name.startswith("learner") else "", *sys.argv[4:], file=file)
number = sum(line.startswith(name + " ") for line in (folder / "starts").read_text().splitlines())
script = folder / f"{name}.{number}"
exec((script if script.exists() else folder / name).read_text())
'''

WORK = "while not (folder / 'end').exists(): time.sleep(0.02)"


class Services:
    """Stand-ins in a folder, and the launcher that runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "services.py").write_text(SERVICES)
        self.does("learner", WORK)
        self.does("actor-0", WORK)
        self.stop = StopRequest()

    def does(self, name: str, script: str) -> None:
        """Write the script that a service runs: `NAME` for every start, `NAME.START` for one of its starts."""
        (self.folder / name).write_text(textwrap.dedent(script))

    def launcher(self, *, max_restarts: int = 3, learner_processes: int = 1, has_log: bool = True) -> Launcher:
        config = Config(
            run=RunSection(dir=str(self.folder / "run")),
            hub=HubSection(address="tcp://127.0.0.1:0"),
            log=LogSection(enabled=has_log),
            launch=LaunchSection(max_restarts=max_restarts, learner_processes=learner_processes),
        )
        program = (sys.executable, str(self.folder / "services.py"), str(self.folder))
        return Launcher(config, self.stop, FreshStarts(program))

    def starts(self, name: str) -> list[list[str]]:
        """Return process id and further words of each start."""
        file = self.folder / "starts"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [line[1:] for line in lines if line[0] == name]

    def when(self, claim: Callable[[], bool], act: Callable[[], object]) -> None:
        """Call a function in a thread once the claim holds."""

        def wait() -> None:
            wait_for(claim)
            act()

        threading.Thread(target=wait, daemon=True).start()

    def end(self) -> None:
        (self.folder / "end").touch()


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Services:
    monkeypatch.setattr(launcher, "FIRST_WAIT_S", 0.05)
    return Services(tmp_path)


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


def test_killed_learner_is_started_again_and_told_to_resume_while_its_actor_works_on(services: Services) -> None:
    services.does("learner.1", "os.kill(os.getpid(), 9)")
    services.when(lambda: len(services.starts("learner")) == 2, services.end)
    assert services.launcher().run() == 0
    first, second = services.starts("learner")
    assert "run.resume=true" not in first
    assert "run.resume=true" in second
    assert len(services.starts("actor-0")) == 1


def test_actors_of_a_learner_that_kept_nothing_are_started_again_with_it(services: Services) -> None:
    # They belong to a run whose leases the new learner cannot know.
    services.does("learner.1", "time.sleep(0.3); os.kill(os.getpid(), 9)")
    services.when(lambda: len(services.starts("actor-0")) == 2, services.end)
    assert services.launcher(has_log=False).run() == 0
    first, second = services.starts("actor-0")
    assert first[0] != second[0]
    assert not is_alive(int(first[0]))


def test_checkpoint_without_a_log_lets_the_actors_of_a_killed_learner_work_on(services: Services) -> None:
    (services.folder / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    services.does("learner.1", "os.kill(os.getpid(), 9)")
    services.when(lambda: len(services.starts("learner")) == 2, services.end)
    assert services.launcher(has_log=False).run() == 0
    assert len(services.starts("actor-0")) == 1


def test_folder_of_a_living_learner_is_left_as_it_is(services: Services) -> None:
    run = services.folder / "run"
    with held_by_another_process(run):
        with pytest.raises(SettingError, match="is at work in the folder"):
            services.launcher().run()
        assert not (run / "launch.toml").exists()
    assert services.starts("learner") == []


def launch(folder: Path) -> None:
    Services(folder).launcher().run()


def test_folder_of_a_living_launcher_is_left_as_it_is_before_its_learner_has_locked_it(services: Services) -> None:
    # The learner of a second run, which would end it.
    services.does("learner.2", "")
    first = multiprocessing.get_context("spawn").Process(target=launch, args=(services.folder,))
    first.start()
    wait_for(lambda: services.starts("learner") != [])
    settings = (services.folder / "run" / "launch.toml").read_text()
    try:
        with pytest.raises(SettingError, match=rf"another launcher \(process {first.pid} .*is at work in the folder"):
            services.launcher().run()
        assert (services.folder / "run" / "launch.toml").read_text() == settings
    finally:
        services.end()
        first.join()
    assert first.exitcode == 0


def test_all_ranks_of_the_learner_are_started_again_when_one_dies(services: Services) -> None:
    services.does("learner-1", WORK)
    services.does("learner-1.1", "time.sleep(0.2); os.kill(os.getpid(), 9)")
    # Each rank writes its start down when it runs: the second may be the last.
    services.when(lambda: [len(services.starts(name)) for name in ("learner", "learner-1")] == [2, 2], services.end)
    assert services.launcher(learner_processes=2).run() == 0
    assert not is_alive(int(services.starts("learner")[0][0]))


def test_what_a_dead_actor_leaves_in_its_group_is_ended_before_it_is_started_again(services: Services) -> None:
    orphan = "child = subprocess.Popen(['sleep', '600']); (folder / 'child').write_text(str(child.pid))"
    services.does("actor-0.1", f"{orphan}; os.kill(os.getpid(), 9)")
    was_alive: list[bool] = []
    services.when(
        lambda: len(services.starts("actor-0")) == 2,
        lambda: (was_alive.append(is_alive(int((services.folder / "child").read_text()))), services.end()),
    )
    assert services.launcher().run() == 0
    assert was_alive == [False]


@pytest.mark.parametrize("name", ["learner", "actor-0"])
def test_service_that_keeps_dying_ends_the_run_when_its_restarts_are_spent(services: Services, name: str) -> None:
    services.does(name, "print('out of memory', flush=True); sys.exit(1)")
    with pytest.raises(LaunchError, match=f"{name} ended with exit status 1 after 2 of 2 restarts") as error:
        services.launcher(max_restarts=2).run()
    assert len(services.starts(name)) == 3
    # The learner writes to the terminal directly.
    assert ("out of memory" in str(error.value)) == (name == "actor-0")


def test_mistake_of_the_user_ends_the_run_at_once(services: Services) -> None:
    services.does("learner", "sys.exit(2)")
    assert services.launcher().run() == 2
    assert len(services.starts("learner")) == 1


def test_mistake_that_only_a_later_rank_sees_ends_the_run_with_the_end_of_its_log(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    services.does("learner-1", "print('error: model.path'); sys.exit(2)")
    assert services.launcher(learner_processes=2).run() == 2
    assert "error: model.path" in caplog.text


def test_mistake_that_only_an_actor_sees_ends_the_run_with_the_end_of_its_log(services: Services) -> None:
    services.does("actor-0", "print('error: task.reward'); sys.exit(2)")
    with pytest.raises(LaunchError, match=r"actor-0 ended with exit status 2(.|\n)*error: task.reward"):
        services.launcher().run()


def test_learner_may_write_its_checkpoint_when_an_actor_is_given_up(services: Services) -> None:
    stopped = "import signal; signal.signal(signal.SIGTERM, lambda *_: ((folder / 'saved').touch(), sys.exit(0)))\n"
    services.does("learner", f"{stopped}(folder / 'ready').touch()\n{WORK}")
    services.does("actor-0", "while not (folder / 'ready').exists(): time.sleep(0.02)\nsys.exit(2)")
    with pytest.raises(LaunchError, match="actor-0 ended with exit status 2"):
        services.launcher().run()
    assert (services.folder / "saved").exists()


def test_learner_that_gave_up_is_not_started_again(services: Services) -> None:
    services.does("learner", "sys.exit(3)")
    with pytest.raises(LaunchError, match="learner ended with exit status 3"):
        services.launcher().run()
    assert len(services.starts("learner")) == 1


def test_learner_that_was_paused_by_a_signal_of_its_own_pauses_the_run(services: Services) -> None:
    services.does("learner", "time.sleep(0.2); sys.exit(143)")
    assert services.launcher().run() == PAUSED_STATUS
    assert len(services.starts("learner")) == 1


def test_actor_that_a_failing_learner_sent_away_comes_back_with_the_next_learner(services: Services) -> None:
    services.does("actor-0.1", "sys.exit(0)")
    services.does("learner.1", "time.sleep(0.5); sys.exit(1)")
    services.when(lambda: len(services.starts("actor-0")) == 2, services.end)
    assert services.launcher().run() == 0


def test_actor_that_left_in_good_order_is_not_started_again(services: Services) -> None:
    services.does("actor-0", "sys.exit(0)")
    services.does("learner", "time.sleep(0.8)")
    assert services.launcher().run() == 0
    assert len(services.starts("actor-0")) == 1


def test_signal_asks_the_learner_to_stop_and_leaves_nothing_behind(services: Services) -> None:
    drain = "import signal; signal.signal(signal.SIGTERM, lambda *_: (folder / 'end').touch()); (folder / 'ready').touch()"
    services.does("learner", f"{drain}\n{WORK}")
    services.when((services.folder / "ready").exists, lambda: services.stop._on_signal(signal.SIGINT, None))
    assert services.launcher().run() == 130
    assert not any(is_alive(int(start[0])) for start in services.starts("learner") + services.starts("actor-0"))


def test_refused_resume_ends_with_the_refusal_and_no_summary_of_the_run_before(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (services.folder / "run").mkdir()
    with MetricsWriter(services.folder / "run") as metrics:
        metrics.write(StepRow(policy_version=1, metrics={}))
    services.does("learner", "sys.exit(2)")
    assert services.launcher().run() == 2
    assert not (services.folder / "run" / "report.html").exists()
    assert "the run" not in caplog.text


@pytest.mark.engine
@pytest.mark.timeout(SERVICES_S)
def test_kill_of_the_launcher_leaves_no_service_and_no_child_of_one(
    tmp_path: Path, tiny_model: Path, warm: WarmProcess
) -> None:
    """The real command line starts a learner, and an actor with reward workers."""
    with services_in(tmp_path, warm) as services:
        config = write_config(tmp_path, tiny_model, actor={"engine": "transformers", "engine_options": {}})
        train = services.start("train", config, is_real=True)
        services.wait_for(lambda: len(descendants(train.pid)) >= 4, "learner, actor, and the actor's reward worker")
        left = descendants(train.pid)
        train.kill()
        wait_for(lambda: not any(map(is_alive, left)))


def descendants(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in (line.split() for line in listing.splitlines())}
    found, front = [], [pid]
    while front:
        front = [child for child, parent in parents.items() if parent in front]
        found += front
    return found


def test_restarts_wait_longer_each_time_and_come_back_after_ten_minutes_of_work() -> None:
    budget = RestartBudget(max_restarts=7)
    assert [budget.spend(now) for now in range(5)] == [1, 2, 4, 8, 10]
    budget.note_start(10)
    assert budget.spend(10 + 9) == 10
    budget.note_start(20)
    assert budget.spend(20 + 10) == 1, "it worked for longer than the longest wait"
    budget.note_start(40)
    assert budget.spend(40 + 599) is None
    budget.note_start(1000)
    assert budget.spend(1000 + 600) == 1


def test_port_of_the_hub_is_none_that_a_reconnecting_actor_could_be_given(services: Services) -> None:
    services.end()
    services.launcher().run()
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    settings = (services.folder / "run" / "launch.toml").read_text()
    port = int(settings.split('address = "tcp://127.0.0.1:')[1].split('"')[0])
    assert 1024 < port < lowest


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_reserved_port_is_given_to_no_other_run_and_the_learner_may_bind_it_again_and_again(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host == "[::1]" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with launcher.reserve_port(host) as reserved:
        port = reserved.getsockname()[1]
        monkeypatch.setattr(launcher, "PORTS", [port])
        for _ in range(2):
            with pytest.raises(SettingError, match="no port is free"):
                launcher.free_port(host)
            with zmq.Context() as context, context.socket(zmq.ROUTER) as learner:
                learner.linger = 0
                learner.setsockopt(zmq.IPV6, host == "[::1]")
                learner.bind(f"tcp://{host}:{port}")
                with socket.create_connection((host.strip("[]"), port), timeout=10):
                    pass
    assert launcher.free_port(host) == port


def test_port_of_the_hub_is_the_runs_own_as_long_as_it_lasts(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    services.end()
    first = services.launcher()
    port = int(first._config.hub.address.rpartition(":")[2])
    monkeypatch.setattr(launcher, "PORTS", [port])
    with pytest.raises(SettingError, match="no port is free"):
        services.launcher()
    assert first.run() == 0
    assert launcher.free_port("127.0.0.1") == port


def test_log_that_grows_past_its_bound_moves_aside_while_its_actor_writes_on(services: Services, monkeypatch) -> None:
    monkeypatch.setattr(launcher, "MAX_FILE_BYTES", 1000)
    services.does("actor-0", "print('x' * 2000, flush=True); time.sleep(0.5); print('later', flush=True)\n" + WORK)
    log = services.folder / "run" / "logs" / "actor-0.log"
    services.when(lambda: log.exists() and log.read_text() == "later\n", services.end)
    assert services.launcher().run() == 0
    assert log.with_name("actor-0.log.1").read_text() == "x" * 2000 + "\n"


def test_log_that_somebody_deleted_neither_ends_the_run_nor_hides_why_it_failed(services: Services) -> None:
    log = services.folder / "run" / "logs" / "actor-0.log"
    services.does("actor-0", "while not (folder / 'fail').exists(): time.sleep(0.02)\nsys.exit(2)")

    def delete() -> None:
        log.unlink()
        # A few looks at the logs later.
        time.sleep(3 * launcher.LOOK_S)
        (services.folder / "fail").touch()

    services.when(log.exists, delete)
    with pytest.raises(LaunchError, match=rf"actor-0 ended with exit status 2\. {re.escape(str(log))} was deleted or renamed"):
        services.launcher().run()
