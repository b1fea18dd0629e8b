"""`offbeat demo`: a run on a live page, in which services are killed and settings changed, and the proof that nothing was lost.

`offbeat train` (a process of its own) -> RUN/metrics.jsonl -> the next scene is played at its step
scenes: kill -9 of an actor, kill -9 of the learner, `offbeat set`, `offbeat scale`
end: the report, the ledger's line, `offbeat audit`
"""

import logging
import os
import signal
import sys
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from offbeat.common.errors import RunError, ServiceError
from offbeat.common.processes import process_table as processes
from offbeat.common.processes.shutdown import INTERRUPTED_STATUS
from offbeat.common.records.logs import doing
from offbeat.common.records.rows import LedgerSums
from offbeat.common.records.run_folder import LOG, PORT_FILE, read_owner, read_run_config
from offbeat.common.settings.config import Config, actors_wanted
from offbeat.deploy.local.notebook import Run
from offbeat.deploy.operating.link import open_link_to
from offbeat.deploy.operating.set import tune
from offbeat.lab.audit import audit, print_checks

logger = logging.getLogger(__name__)

SAY_S = 1.0
"""Least seconds between two lines about steps."""
CHECKPOINT_INTERVAL = 5
"""Optimizer steps between two checkpoints: the learner that is killed goes back by up to this many."""


class Stage:
    """A run whose scenes are played as its rows come."""

    def __init__(self, run: Run, config: Config, say: Callable[[str], None]) -> None:
        self.run = run
        self.config = config
        self.say = say
        self._left = list(SCENES)
        self._awaited: str | None = None
        self._played_at = 0.0
        self._said_at = 0.0

    def take(self, row: Mapping[str, Any]) -> None:
        """Tell what a row says, and play the scene that is due."""
        if row["kind"] == "event" and row["event"] == self._awaited:
            who = row.get("actor") or "the learner"
            self.say(f"        {who} is at work after {time.monotonic() - self._played_at:.0f} s")
            self._awaited = None
        if row["kind"] != "step":
            return
        step = row["policy_version"]
        if time.monotonic() - self._said_at >= SAY_S or step == self.config.train.num_steps:
            self._said_at = time.monotonic()
            self.say(
                f"step {step:3d}/{self.config.train.num_steps}  reward {row['reward/mean']:.3f}  lag {row['lag/mean']:.1f}"
            )
        if self._left and step >= self._left[0][0] and self._awaited is None:
            _, play = self._left.pop(0)
            self._played_at = time.monotonic()
            self._awaited = play(self)

    def request(self, settings: Mapping[str, str]) -> None:
        """Change settings as `offbeat set` does, and say what the learner answers."""
        hub = read_run_config(self.run.folder).hub
        try:
            tune(open_link_to(hub, "operator"), hub.address, settings)
        except ServiceError as error:
            self.say(f"        {error}")


def _kill_actor(stage: Stage) -> str | None:
    name = f"actor-{actors_wanted(stage.config) - 1}"
    # Its command line names it: services are forked from a warm process, whose other children have lines of their own.
    named = [pid for pid in processes.descendants(stage.run.pid) if f'actor.name="{name}"' in processes.arguments(pid)]
    if not named:
        return None
    stage.say(f"        kill -9 {named[0]}: {name} dies in the middle of its work, which goes to others")
    os.kill(named[0], signal.SIGKILL)
    return "actor_joined"


def _kill_learner(stage: Stage) -> str | None:
    owner = read_owner(stage.run.folder)
    if owner is None:
        return None
    stage.say(f"        kill -9 {owner.pid}: the learner dies; the next one goes on from its checkpoint and the rollout log")
    os.kill(owner.pid, signal.SIGKILL)
    return "run_started"


def _change_bound(stage: Stage) -> None:
    bound = stage.config.staleness.max_staleness
    wanted = bound // 2 or 4
    stage.say(f"        offbeat set {stage.run.folder.name} max_staleness={wanted}")
    stage.request({"staleness.max_staleness": str(wanted)})


def _add_actor(stage: Stage) -> str:
    wanted = actors_wanted(stage.config) + 1
    stage.say(f"        offbeat scale {stage.run.folder.name} {wanted}")
    stage.request({"scale.actors": str(wanted)})
    return "actor_joined"


SCENES = ((8, _kill_actor), (14, _kill_learner), (20, _change_bound), (26, _add_actor))
"""First step of each scene, which begins once the scene before it is over, and the function that plays it. That returns the
kind of event that ends the scene, or None to wait for nothing."""


def run_demo(config: Config, command: Sequence[str], say: Callable[[str], None], *, opens_browser: bool) -> int:
    """Play the scenes in the run that `command` makes, print the outcome, and return the exit status.

    Waits for: rows of the run. Unblocked by: its end, or Ctrl-C, which ends the run with all its processes.
    """
    try:
        with doing(logger, "starting learner and actors"):
            run = Run(Path(config.run.dir), command)
        with run:
            if config.metrics.bind:
                page = f"http://127.0.0.1:{(run.folder / PORT_FILE).read_text().strip()}/"
                say(f"live page: {page}")
                if opens_browser and has_browser():
                    webbrowser.open(page)
            stage = Stage(run, config, say)
            for row in run.rows():
                stage.take(row)
            final = run.wait()
    except KeyboardInterrupt:
        say("stopped; no process is left")
        return INTERRUPTED_STATUS
    except RunError as error:
        raise ServiceError(str(error)) from error
    return tell_end(run.folder, final, say)


def tell_end(folder: Path, final: Mapping[str, Any], say: Callable[[str], None]) -> int:
    """Say where the report is, sum up the ledger, and print the audit; return 1 where one of them does not add up."""
    ledger = msgspec.convert(final["ledger"], LedgerSums)
    ended = {"trained": ledger.trained, **ledger.dropped, "expired": ledger.expired, "in flight": ledger.in_flight}
    say(f"report: {folder / 'report.html'}")
    say(f"ledger: {ledger.leased} leased = {' + '.join(f'{number} {name}' for name, number in ended.items() if number)}")
    if not print_checks(audit(folder, read_run_config(folder))):
        say("The audit found violations.")
        return 1
    if not ledger.adds_up:
        say("The ledger does not add up.")
        return 1
    if not (folder / LOG).exists():
        say("Without a rollout log (log.enabled=false) no lease was audited.")
        return 0
    say("Nothing was lost, and nothing was trained twice.")
    return 0


def has_browser() -> bool:
    """Return whether a page can be shown: a browser that would take this terminal does not count."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True
