"""The services of a run on a cluster, which ends them and starts them again: the fleet of actors, and a learner that moves.

The actors share one name and one key. The learner pauses when it is asked to end, and goes on where it was.
"""

import math
from pathlib import Path

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config

FLEET = "actor"
"""Beginning of the actors' names, and stem of the key file that they share."""
MARGIN_S = 15
"""Seconds that an actor has before its cluster kills it beyond those that it may take to leave."""


def find_fleet_key(key: str) -> Path:
    """Return the key file that all actors share, as `hub.key` names it; raise `SettingError` where there is none."""
    path = Path(key.replace("{name}", FLEET)).absolute()
    if not path.exists():
        cure = (
            f"Make it: offbeat keygen {path.parent} '{FLEET}-*'; or leave out hub.key, and a run on Slurm gets keys of its own."
        )
        raise SettingError("hub.key", key, f"there is no {path}, the key that all actors of a cluster share", cure)
    return path


def slurm_folder(folder: Path) -> Path:
    """Return a folder of logs as Slurm's `--output` takes it: Slurm replaces % and the letter behind it."""
    return Path(str(folder).replace("%", "%%"))


def leave_s(config: Config) -> int:
    """Return the seconds that an actor may take to leave: it finishes its work, and waits for the learner's answer."""
    working_s = config.actor.leave_within_s if config.actor.leave == "finish" else 0.0
    return math.ceil(working_s + config.hub.dead_after_s)


def notice_s(config: Config) -> int:
    """Return the seconds between the signal that asks an actor to leave and the one that kills it."""
    return leave_s(config) + MARGIN_S


NOTICE_S = 300
"""Seconds that a cluster gives the learner between SIGTERM and its end."""
LEARNER_GRACE_S = NOTICE_S - 15
"""Seconds of them until the learner is done; the rest is for the end of its process."""


def moving_settings(config: Config) -> list[str]:
    """Return the settings by which one command begins a run and goes on with it; the user's `run.grace_s` stays."""
    grace = [] if config.run.grace_s is not None else [f"run.grace_s={LEARNER_GRACE_S}"]
    return ["run.resume=auto", *grace]


def torchrun_options(config: Config) -> list[str]:
    """Return the options of torchrun for a learner of several processes on one machine that `moving_settings` pauses."""
    grace_s = math.ceil(config.run.grace_s or LEARNER_GRACE_S)
    # By default, torchrun kills the processes 30 s after SIGTERM, in the middle of a checkpoint.
    return ["--standalone", f"--nproc-per-node={config.launch.learner_processes}", f"--shutdown-timeout={grace_s}"]
