"""A sweep whose runs are made by a stand-in for `offbeat train`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from offbeat.common.processes.shutdown import StopRequest
from offbeat.deploy.experiments.sweep_runs import MachinePart, run_sweep
from offbeat.deploy.experiments.trials import SweepTrial, make_trials, prepare
from offbeat.lab.sweep.plan import Plan, make_plan
from tests.lab.sweep.sweep_runs import stand_in, starts

CONFIG = """
[model]
path = "no/model"
[data]
train_data = "train.jsonl"
[train]
num_steps = 1
"""


class Sweep:
    """A sweep of max_staleness in a folder, and its runs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / "sweep"
        self.stop = StopRequest()
        self.said: list[str] = []
        self.num_reports = 0
        self.on_say: Callable[[], None] = lambda: None
        self.program = stand_in(home)
        (home / "run.toml").write_text(CONFIG)

    def does(self, name: str, script: str) -> None:
        """Write the script of a run: `MAX_STALENESS-SEED`, `MAX_STALENESS-SEED.START` for one of its starts, or `any`."""
        (self.home / name).write_text(script)

    def plan(self, *values: str, seeds: int = 1) -> Plan:
        return make_plan([f"max_staleness={','.join(values)}"], num_seeds=seeds, first_seed=0)

    def trials(self, *values: str, seeds: int = 1, overrides: Sequence[str] = ()) -> list[SweepTrial]:
        """Write the runs of a sweep into its folder and return them."""
        plan = self.plan(*values, seeds=seeds)
        trials = make_trials(plan, self.home / "run.toml", overrides, self.folder)
        prepare(plan, trials, self.folder)
        return trials

    def run(
        self,
        *values: str,
        seeds: int = 1,
        num_at_once: int = 1,
        shard: slice = slice(None),
        stops_hopeless: bool = False,
    ) -> int:
        """Run one `offbeat sweep`; return the exit status."""
        self.said.clear()
        return run_sweep(
            self.trials(*values, seeds=seeds)[shard],
            self.folder,
            self.stop,
            say=self._say,
            write_report=self._report,
            places=[MachinePart()] * num_at_once,
            stops_hopeless=stops_hopeless,
            program=self.program,
        )

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.on_say()

    def _report(self) -> Path:
        self.num_reports += 1
        return self.folder / "sweep.html"

    @property
    def starts(self) -> list[str]:
        return starts(self.home)
