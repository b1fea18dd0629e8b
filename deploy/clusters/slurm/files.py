"""The batch scripts of a run on Slurm: one job for the learner, and an array of jobs for the actors.

Both scripts run the user's own TOML file, and name what differs on a cluster as settings behind it. The actors find the learner
by an address file in the run's folder, so it may be started on any node, and on another one after a requeue.
"""

import os
import shlex
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from offbeat.common.errors import SettingError
from offbeat.common.setting_text import write_private
from offbeat.common.settings.config import Config, actors_wanted
from offbeat.deploy.clusters.fleet import FLEET, notice_s
from offbeat.deploy.clusters.moving_learner import NOTICE_S, moving_settings
from offbeat.deploy.clusters.slurm.pool import ACTORS_SCRIPT
from offbeat.deploy.local.keygen import ALLOWED_KEYS, make_keys
from offbeat.deploy.local.starts import PROGRAM
from offbeat.protocols.addresses import is_loopback
from offbeat.protocols.text import as_name

LEARNER_SCRIPT = "learner.sbatch"
KEYS = "keys"
JOB_LOGS = "logs"


class Places(NamedTuple):
    """The absolute paths that the scripts name."""

    config: Path
    """The user's TOML file."""
    out: Path
    run: Path
    """The run's folder."""

    @property
    def keys(self) -> Path:
        return self.out / KEYS


def write_scripts(
    config: Config,
    path: Path,
    overrides: Sequence[str],
    out: Path,
    learner_options: Sequence[str],
    actor_options: Sequence[str],
) -> str:
    """Write the scripts of a run, and its keys unless it has some, to `out`; return what the user does next.

    The options are lines of options of sbatch. Raises `SettingError` where the run's own keys have none for a fleet of actors.
    """
    places = Places(path.absolute(), out.absolute(), Path(config.run.dir).absolute())
    (places.out / JOB_LOGS).mkdir(parents=True, exist_ok=True)
    settings = [*overrides, *_cluster_settings(config, places)]
    fleet_key = f"hub.key={_fleet_key(config, places)}"
    # Private: settings may hold secrets.
    write_private(places.out / LEARNER_SCRIPT, learner_script(config, places, settings, learner_options))
    actors = actors_script(config, places, [*settings, fleet_key], actor_options)
    write_private(places.out / ACTORS_SCRIPT, actors)
    return f"""\
made {LEARNER_SCRIPT}, {ACTORS_SCRIPT} and the keys. To start the run:
  sbatch {shlex.quote(str(out / LEARNER_SCRIPT))}
  sbatch {shlex.quote(str(out / ACTORS_SCRIPT))}
To look at it, once the learner has started: offbeat status {shlex.quote(config.run.dir)} --watch"""


def learner_script(config: Config, places: Places, settings: Iterable[str], options: Iterable[str]) -> str:
    """Return the text of `learner.sbatch`."""
    return f"""\
#!/bin/bash
# The learner of the run {places.run}, written by `offbeat deploy slurm`. Change it as you like.
#   start, and go on later:  sbatch {_word(places.out / LEARNER_SCRIPT)}
#   jobs one after another:  the same command several times, with --dependency=singleton, where jobs have a time limit
#   pause:                   scancel --batch --signal=TERM JOB    (it writes a checkpoint; the actors wait)
#   end, with a model:       scancel --batch --signal=INT JOB     (the actors leave)
# A job that is requeued, or submitted again, goes on from the newest checkpoint and the rollout log.
{_directives(places, "learner", "learner-%j.log", NOTICE_S, options)}
# exec: signals of Slurm reach the learner, not a shell that waits for it.
exec {_program(config.launch.learner_processes)} learner {_words([places.config, *settings, *moving_settings(config)])}
"""


def actors_script(config: Config, places: Places, settings: Iterable[str], options: Iterable[str]) -> str:
    """Return the text of `actors.sbatch`."""
    return f"""\
#!/bin/bash
# The actors of the run {places.run}, written by `offbeat deploy slurm`. Each task of the array is one actor.
#   start them:   sbatch {_word(places.out / ACTORS_SCRIPT)}
#   start more:   sbatch --array=0-7 {_word(places.out / ACTORS_SCRIPT)}
#   end one:      scancel --batch --signal=TERM JOB_TASK    (without --signal it is killed after KillWait, done or not)
# They may start before the learner, and be preempted: a requeued actor joins again.
#SBATCH --array=0-{actors_wanted(config) - 1}
{_directives(places, "actors", "actor-%A-%a.log", notice_s(config), options)}
# exec: signals of Slurm reach the actor, not a shell that waits for it.
exec {_program(1)} actor {_words([places.config, *settings])} "actor.name={FLEET}-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID"
"""


def _directives(places: Places, kind: str, log: str, before_end_s: int, options: Iterable[str]) -> str:
    # Jobs are recognized by their names, and another project may have a run of this name.
    path = zlib.crc32(os.fsencode(places.run))
    own = [
        f"--job-name={as_name(f'{kind}-{places.run.name}-{path:08x}')}",
        f"--chdir={_word(Path.cwd())}",
        f"--output={_word(places.out / JOB_LOGS / log)}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:TERM@{before_end_s}",
        "--nodes=1",
        "--ntasks=1",
    ]
    # The user's come last, and win.
    return "\n".join(f"#SBATCH {option}" for option in (*own, *options))


def _cluster_settings(config: Config, places: Places) -> list[str]:
    """Return the settings that differ between one machine and a cluster."""
    settings = [f"run.dir={places.run}"]
    if is_loopback(config.hub.address):
        settings += [f"hub.address=file:{places.run}/hub.address", "hub.bind=tcp://0.0.0.0:0"]
    if not config.hub.key:
        if not (places.keys / f"{FLEET}.key").exists():
            make_keys(places.keys, [f"{FLEET}-*"])
        settings += [
            f"hub.key={places.keys}/{{name}}.key",
            f"hub.learner_key={places.keys}/learner.pub",
            f"hub.allowed_keys={places.keys / ALLOWED_KEYS}",
        ]
    return settings


def _fleet_key(config: Config, places: Places) -> Path:
    """Return the key file that all actors share."""
    key = config.hub.key or f"{places.keys}/{{name}}.key"
    path = Path(key.replace("{name}", FLEET)).absolute()
    if not path.exists():
        cure = f"Make it: offbeat keygen {path.parent} '{FLEET}-*'; or leave out hub.key, and a run gets keys of its own."
        raise SettingError("hub.key", config.hub.key, f"there is no {path}, the key that all actors of an array share", cure)
    return path


def _program(num_processes: int) -> str:
    if num_processes == 1:
        return _words(PROGRAM)
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}", "-m", PROGRAM[2]]
    return _words([sys.executable, *ranks])


def _words(words: Iterable[object]) -> str:
    return " ".join(_word(word) for word in words)


def _word(word: object) -> str:
    return shlex.quote(str(word))
