"""docs/slurm.md on a real Slurm: actors are scaled and preempted, the learner is requeued, and the run goes on."""

import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from offbeat.common.settings.loading import load
from offbeat.lab.audit import audit
from offbeat.learner.leases.events import Expired
from offbeat.learner.leases.log_reading import read_log
from tests.deploy.services import SERVICES_S, SLOW_REWARD, Process, Services, write_config
from tests.deploy.slurm_cluster import Slurm, missing_programs, slurm_in

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(SERVICES_S),
    pytest.mark.skipif(bool(missing_programs()), reason=f"Slurm is not installed: {', '.join(missing_programs())}"),
]
PAGE = (Path(__file__).parents[2] / "docs/slurm.md").read_text().replace("\\\n    ", "")
RUN = "runs/a"
KILL_WAIT_S = 600
"""Slurm's patience with jobs that end: on a busy machine it shall not kill what leaves in order."""


class User:
    """Somebody at a login node who types what the page says."""

    def __init__(self, services: Services, slurm: Slurm) -> None:
        self._services = services
        self._slurm = slurm

    def types(self, command: str, own: Mapping[str, str] = {}) -> str:
        """Run a command of the page to its end, with `own` words in the place of the page's. Return its output."""
        program, *arguments = self._words(command, own)
        if program != "offbeat":
            return self._slurm.run(program, *arguments)
        done = self._services.run(*arguments, is_real=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def starts(self, command: str, log: str) -> Process:
        """Start a command of the page that goes on."""
        return self._services.start(*self._words(command, {})[1:], log=log, is_real=True)

    def _words(self, command: str, own: Mapping[str, str]) -> list[str]:
        assert command in PAGE, f"docs/slurm.md does not say: {command}"
        for word, replacement in own.items():
            assert word in command
            command = command.replace(word, replacement)
        return shlex.split(command)


@pytest.fixture
def slurm(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Yield a cluster of three nodes with a core each. Commands are typed in the test's folder."""
    monkeypatch.setenv("SLURM_CONF", str(cluster / "slurm.conf"))
    monkeypatch.chdir(tmp_path)
    with slurm_in(cluster, kill_wait_s=KILL_WAIT_S) as slurm:
        yield slurm


def test_run_goes_on_while_actors_are_scaled_and_preempted_and_the_learner_is_requeued(
    slurm: Slurm, services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    write_config(
        tmp_path,
        tiny_model,
        train={"num_steps": 100_000, "groups_per_step": 4, "learning_rate": 1e-4, "checkpoint_interval": 1000},
        # The cores are left to the jobs that start.
        task=SLOW_REWARD,
        rollout={"max_new_tokens": 4},
        hub={"address": "tcp://127.0.0.1:0"},
        actor={"max_inflight_groups": 4, "engine": "transformers", "engine_options": {}},
    )
    user = User(services, slurm)
    user.types(
        "offbeat deploy slurm run.toml run.dir=runs/a scale.actors=4 --out job "
        '--learner "--partition=gpu --gres=gpu:1 --time=24:00:00" --actor "--partition=spot --gres=gpu:1"',
        {"scale.actors=4": "scale.actors=1", "--partition=gpu": "--partition=main", " --gres=gpu:1": ""},
    )
    learner = user.types("sbatch job/learner.sbatch").split()[-1]
    first = f"{user.types('sbatch job/actors.sbatch').split()[-1]}_0"
    services.wait_for(lambda: (tmp_path / RUN / "hub.address").exists(), "the learner has started")

    user.types("offbeat scale runs/a 8", {"8": "2"})
    reconciler = user.starts("offbeat reconcile runs/a --on slurm:job", "reconciler")
    services.wait_for(lambda: len(slurm.states()) == 3, "a second actor is submitted")
    (second,) = slurm.states().keys() - {learner, first}
    names = {job: f"actor-{job.replace('_', '-')}" for job in (first, second)}

    def num_groups(job: str) -> int:
        return sum(row["actor"] == names[job] for row in services.rows(RUN, "group"))

    def num_events(event: str, job: str) -> int:
        return sum((row["event"], row.get("actor")) == (event, names.get(job)) for row in services.rows(RUN, "event"))

    services.wait_for(lambda: all(map(num_groups, names)), "groups of both actors")

    begun = tmp_path / "begun"
    wrapped = f"--wrap=touch {begun}; exec sleep infinity"
    other = slurm.run("sbatch", "--parsable", "--partition=main", "--output=/dev/null", wrapped).strip()
    # A job that is cancelled before its first process is there misses the signal, and keeps its node.
    services.wait_for(begun.exists, "an actor makes way for the job of another user")
    (preempted,) = [job for job, state in slurm.states().items() if state == "PENDING"]
    num_before = num_groups(preempted)
    slurm.run("scancel", other)
    user.types("scontrol update JobId=JOB_TASK StartTime=now", {"JOB_TASK": preempted})

    reconciler.terminate()
    assert services.wait(reconciler, "reconciler") == 0, services.output("reconciler")
    user.types("scontrol requeue JOB", {"JOB": learner})
    services.wait_for(lambda: slurm.states()[learner] == "PENDING", "the learner has paused")
    user.types("scontrol update JobId=JOB_TASK StartTime=now", {"JOB_TASK": learner})
    services.wait_for(lambda: all(num_events("actor_joined", job) > 1 for job in names), "both actors find the learner again")
    services.wait_for(lambda: num_groups(preempted) > num_before, "groups of the actor that was preempted")

    user.types("offbeat scale runs/a 8", {"8": "1"})
    reconciler = user.starts("offbeat reconcile runs/a --on slurm:job", "reconciler")
    services.wait_for(lambda: slurm.states().keys() == {learner, first}, "the newest actor has left")

    ended_at = time.time()
    user.types("scancel --batch --signal=INT JOB", {"JOB": learner})
    services.wait_for(lambda: not slurm.states(), "the end of all jobs")
    assert services.wait(reconciler, "reconciler") == 0, services.output("reconciler")
    ends = dict.fromkeys((learner, first, second), "COMPLETED") | {other: "CANCELLED"}
    assert slurm.states("--states=all") == ends, slurm.logs()
    assert (tmp_path / RUN / "model").exists()

    ledger = services.rows(RUN, "final")[-1]["ledger"]
    assert ledger["leased"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["expired"] + ledger["in_flight"]
    expired = [record.event for record in read_log(tmp_path / RUN / "log") if isinstance(record.event, Expired)]
    # None by its deadline, or because its actor was silent. One that the first learner had logged and not sent reached nobody.
    kept = {event.reason for event in expired if event.at < ended_at}
    assert kept <= {"handed back by the actor", "the actor no longer has it"}
    checks = audit(tmp_path / RUN, load(tmp_path / RUN / "config.toml"))
    assert not [violation for check in checks for violation in check.violations]
