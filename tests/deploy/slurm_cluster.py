"""A real Slurm as plain processes in one folder: munged, slurmctld and three slurmd, which all are this machine.

Debian has the programs: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge. `.ci/run` requires them.
"""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offbeat.common.processes import process_table as processes
from tests.deploy.services import free_port
from tests.process_ends import kill_and_wait

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NUM_NODES = 3
START_S = 60.0
COMMAND_S = 100.0
"""More than MessageTimeout, in which Slurm's commands wait for its daemons."""
# Where a node takes longer than MessageTimeout, by default 10 s, to answer, a job that starts is held back for two minutes.
CONF = """\
ClusterName=offbeat
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait_s}
MessageTimeout=90
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=off OverSubscribe=NO
PartitionName=spot Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
"""
NODE = "NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=2000 State=UNKNOWN"


class Slurm:
    """The commands of a running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands; return its output. Fail with its errors."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def states(self, *options: str) -> dict[str, str]:
        """Return the state of each job that is not over, by `JOB` or `JOB_TASK`; options of squeue choose other leases."""
        lines = self.run("squeue", "--noheader", "--array", "--format=%i %T", *options).splitlines()
        return dict(line.split() for line in lines)

    def logs(self) -> str:
        """Return the ends of the logs of all daemons."""
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in self.folder.glob("*.log"))


def missing_programs() -> list[str]:
    """Return the programs of a cluster that this machine does not have."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


@contextmanager
def slurm_in(folder: Path, *, kill_wait_s: int) -> Iterator[Slurm]:
    """Yield a cluster with the partitions `main` and `spot`, whose leases those of `main` preempt; end it with all its leases.

    Commands find the cluster by the environment variable SLURM_CONF, which the caller sets to `folder/slurm.conf`.
    """
    _configure(folder, kill_wait_s)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / f"{command[0]}.out").open("ab") as output:
            daemons.append(
                subprocess.Popen(
                    command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, process_group=0
                )
            )

    try:
        files = {"key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        places = [f"--{option}={folder / name}" for option, name in {**files, "socket": "munge.sock"}.items()]
        start("munged", "--foreground", "--force", *places)
        start("slurmctld", "-D")
        for number in range(1, NUM_NODES + 1):
            start("slurmd", "-D", "-N", f"node{number}")
        slurm = Slurm(folder)
        _await_nodes(slurm, daemons)
        yield slurm
    finally:
        for daemon in daemons:
            processes.kill_group(daemon.pid)
            daemon.wait()
        # LeasesAtWork, and slurmd's helpers that wait for them, are in sessions of their own.
        for pid in processes.marked("SLURM_CONF", environment["SLURM_CONF"]):
            if pid != os.getpid():
                kill_and_wait(pid)


def _configure(folder: Path, kill_wait_s: int) -> None:
    host, ports = socket.gethostname(), [free_port() for _ in range(1 + NUM_NODES)]
    nodes = "\n".join(NODE.format(number=number, host=host, port=ports[number]) for number in range(1, NUM_NODES + 1))
    text = CONF.format(host=host, user=getpass.getuser(), folder=folder, ports=ports, nodes=nodes, kill_wait_s=kill_wait_s)
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    # munged wants a folder and a key that no other user can change.
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))


def _await_nodes(slurm: Slurm, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        shown = subprocess.run(
            ["sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D"],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if shown.stdout.split() == [str(NUM_NODES)]:
            return
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        assert not ended, f"{ended}\n{slurm.logs()}"
        assert time.monotonic() < deadline, f"{shown}\n{slurm.logs()}"
        time.sleep(0.1)


def _path() -> str:
    """Return the PATH with the folders where Debian puts daemons, which users' own lacks."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
