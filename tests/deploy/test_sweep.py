"""A sweep runs, resumes, restarts and refuses runs; a stand-in replaces `offbeat train`."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.common.config import Config
from offbeat.common.settings import SettingError, load
from offbeat.common.shutdown import StopRequest
from offbeat.deploy.sweep import Cell, check_cells, make_cells, prepare, render_commands, run_sweep
from offbeat.lab.sweep.plan import Plan, make_plan, read_plan, split_values
from tests.lab.sweep.sweep_runs import stand_in, starts

pytestmark = pytest.mark.slow

CONFIG = """
[model]
path = "no/model"
[task]
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
        self.on_report: Callable[[], None] = lambda: None
        self.program = stand_in(home)
        (home / "run.toml").write_text(CONFIG)

    def does(self, name: str, script: str) -> None:
        """Write the script of a run: `MAX_STALENESS-SEED`, `MAX_STALENESS-SEED.START` for one of its starts, or `any`."""
        (self.home / name).write_text(script)

    def plan(self, *values: str, seeds: int = 1) -> Plan:
        return make_plan([f"max_staleness={','.join(values)}"], num_seeds=seeds, first_seed=0)

    def cells(self, *values: str, seeds: int = 1, overrides: Sequence[str] = ()) -> list[Cell]:
        """Write the runs of a sweep into its folder and return them."""
        plan = self.plan(*values, seeds=seeds)
        cells = make_cells(plan, self.home / "run.toml", overrides, self.folder)
        self.folder.mkdir(exist_ok=True)
        prepare(plan, cells, self.folder)
        return cells

    def run(self, *values: str, seeds: int = 1) -> int:
        """Run one `offbeat sweep`; return the exit status."""
        self.said.clear()
        plan = self.plan(*values, seeds=seeds)
        cells = make_cells(plan, self.home / "run.toml", (), self.folder)
        return run_sweep(
            plan, cells, self.folder, self.stop, say=self.said.append, write_report=self._report, program=self.program
        )

    def _report(self) -> Path:
        self.num_reports += 1
        self.on_report()
        return self.folder / "sweep.html"

    @property
    def starts(self) -> list[str]:
        return starts(self.home)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def problem(*varied: str, seeds: int = 1) -> str:
    with pytest.raises(SettingError) as raised:
        make_plan(varied, num_seeds=seeds, first_seed=0)
    return str(raised.value)


def test_cells_are_the_product_of_values_and_seeds_one_seed_of_all_before_the_next() -> None:
    plan = make_plan(["max_staleness=0,4", "train.groups_per_step=8,16"], num_seeds=2, first_seed=7)
    assert plan.settings == {"staleness.max_staleness": ["0", "4"], "train.groups_per_step": ["8", "16"]}
    assert [cell.name for cell in plan.cells] == [
        f"max_staleness={bound}/groups_per_step={groups}/seed={seed}"
        for seed in (7, 8)
        for bound in (0, 4)
        for groups in (8, 16)
    ]


@pytest.mark.parametrize(
    ("listed", "values"),
    [
        ("0,1, 2", ["0", "1", "2"]),
        ("[0.9,0.95],[0.8,0.9]", ["[0.9,0.95]", "[0.8,0.9]"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("[[0],[1,2]]", ["[[0],[1,2]]"]),
        ("gspo", ["gspo"]),
    ],
)
def test_values_are_split_at_commas_outside_of_brackets_and_quotes(listed: str, values: list[str]) -> None:
    assert split_values(listed) == values


@given(values=st.lists(st.integers(0, 99).map(str), min_size=1, max_size=6, unique=True), seeds=st.integers(1, 4))
@settings(max_examples=30)
def test_every_plan_has_each_cell_once(values: list[str], seeds: int) -> None:
    cells = make_plan([f"max_staleness={','.join(values)}"], num_seeds=seeds, first_seed=0).cells
    assert len({cell.name for cell in cells}) == len(cells) == len(values) * seeds
    assert {(cell.values[0], cell.seed) for cell in cells} == {(value, seed) for value in values for seed in range(seeds)}


def test_what_cannot_be_swept_is_refused_with_the_cure() -> None:
    assert "Did you mean staleness.max_staleness?" in problem("max_stalenes=0,1")
    assert "reward.clip or advantage.clip" in problem("clip=1,2")
    assert "Use --seeds" in problem("seed=0,1")
    assert "Use --out" in problem("run.dir=a,b")
    assert "a value is missing" in problem("max_staleness")
    assert "a value is missing" in problem("max_staleness=0,,1")
    assert "max_staleness=0/seed=0" in problem("max_staleness=0,0")
    assert "staleness.max_staleness is given twice" in problem("max_staleness=0", "max_off_policy_steps=1")
    assert "nothing is varied" in problem()


def test_impossible_value_is_refused_before_anything_is_written_and_names_the_run(sweep: Sweep) -> None:
    plan = make_plan(["max_staleness=0,4"], num_seeds=1, first_seed=0)
    with pytest.raises(SettingError, match=r'run of the sweep = "max_staleness=0/seed=0": .*would wait forever'):
        make_cells(plan, sweep.home / "run.toml", ["weights.interval=2"], sweep.folder)
    assert not sweep.folder.exists()


def test_check_that_fails_names_the_run(sweep: Sweep) -> None:
    def refuse(config: object) -> None:
        raise SettingError("task.reward", "x", "it cannot be imported", "Correct it.")

    with pytest.raises(SettingError, match=r'"max_staleness=0/seed=0": task.reward = "x": it cannot be imported'):
        check_cells(sweep.cells("0"), refuse)


def test_every_value_is_checked_once_whatever_the_number_of_seeds(sweep: Sweep) -> None:
    checked: list[int] = []

    def note(config: Config) -> None:
        checked.append(config.staleness.max_staleness)
        if config.staleness.max_staleness == 8:
            raise SettingError("task.reward", "x", "it cannot be imported", "Correct it.")

    with pytest.raises(SettingError, match="max_staleness=8/seed=0"):
        check_cells(sweep.cells("0", "4", "8", seeds=3), note)
    assert checked == [0, 4, 8]


def test_settings_of_a_run_are_the_files_with_its_values_and_its_own_folder(sweep: Sweep) -> None:
    sweep.cells("4", "8", seeds=2, overrides=["train.learning_rate=0.5"])
    config = load(sweep.folder / "max_staleness=8" / "seed=1" / "run.toml")
    assert (config.staleness.max_staleness, config.run.seed, config.train.learning_rate) == (8, 1, 0.5)
    assert config.run.dir == str(sweep.folder / "max_staleness=8" / "seed=1")
    assert config.hub.address == "tcp://127.0.0.1:0", "any free port: runs may share a machine"


def test_objectives_own_settings_are_those_of_the_value(sweep: Sweep) -> None:
    plan = make_plan(["objective=gspo,grpo"], num_seeds=1, first_seed=0)
    gspo, grpo = make_cells(plan, sweep.home / "run.toml", [], sweep.folder)
    assert (gspo.config.loss.clip_low, grpo.config.loss.clip_low) == (0.05, 0.2)


def test_all_runs_are_run_once_and_reported(sweep: Sweep) -> None:
    assert sweep.run("0", "4", seeds=2) == 0
    assert sweep.starts == ["0-0 train", "4-0 train", "0-1 train", "4-1 train"]
    assert [line.split(", ")[:2] for line in sweep.said] == [
        [f"{index}/4 max_staleness={bound} seed={seed}: finished", "reward 0.5"]
        for index, (bound, seed) in enumerate([(0, 0), (4, 0), (0, 1), (4, 1)], start=1)
    ]
    assert sweep.num_reports == 5, "one after each run, and the last"


def test_finished_runs_are_not_run_again(sweep: Sweep) -> None:
    sweep.run("0")
    assert sweep.run("0", "4") == 0
    assert sweep.starts == ["0-0 train", "4-0 train"]
    assert sweep.said[0] == "1/2 runs are finished already"
    assert sweep.said[1].startswith("2/2 max_staleness=4 seed=0: finished")


def test_run_that_broke_off_with_a_log_is_resumed(sweep: Sweep) -> None:
    sweep.does("0-0.1", "write('step'); (run / 'log').mkdir(); (run / 'kept').touch(); os.kill(os.getpid(), 9)")
    assert sweep.run("0") == 1
    assert sweep.run("0") == 0
    assert sweep.starts == ["0-0 train", "0-0 train run.resume=true"]
    assert (sweep.folder / "max_staleness=0" / "seed=0" / "kept").exists()


def test_run_that_broke_off_with_a_checkpoint_alone_is_resumed(sweep: Sweep) -> None:
    sweep.does("0-0.1", "write('step'); (run / 'checkpoints' / 'step-00000001').mkdir(parents=True); sys.exit(3)")
    sweep.run("0")
    sweep.run("0")
    assert sweep.starts[1] == "0-0 train run.resume=true"


def test_run_that_left_nothing_to_go_on_from_begins_anew_in_a_clean_folder(sweep: Sweep) -> None:
    sweep.does("0-0.1", "write('step'); (run / 'tensorboard').mkdir(); print('it broke', flush=True); sys.exit(3)")
    assert sweep.run("0") == 1
    sweep.does(
        "0-0.2", "assert sorted(path.name for path in run.iterdir()) == ['run.toml', 'train.log']\nwrite('step', 'final')"
    )
    assert sweep.run("0") == 0
    assert sweep.starts == ["0-0 train", "0-0 train"]
    assert "it broke" in (sweep.folder / "max_staleness=0" / "seed=0" / "train.log").read_text()


def test_stopped_run_is_resumed_though_it_has_a_final_row(sweep: Sweep) -> None:
    sweep.does("0-0.1", "write('step', 'final', outcome='stopped'); (run / 'log').mkdir(); sys.exit(130)")
    sweep.run("0")
    assert sweep.run("0") == 0
    assert sweep.starts[1] == "0-0 train run.resume=true"


def test_failed_run_is_reported_with_its_last_words_and_the_others_go_on(sweep: Sweep) -> None:
    sweep.does("0-0", "print('error: out of memory', flush=True); sys.exit(3)")
    assert sweep.run("0", "4") == 1
    assert "FAILED with exit status 3 (error: out of memory; see" in sweep.said[0]
    assert sweep.said[1].startswith("2/2 max_staleness=4 seed=0: finished")


def test_signal_stops_the_run_in_order_and_the_same_command_goes_on_with_it(sweep: Sweep) -> None:
    sweep.does(
        "0-0.1",
        "signal.signal(signal.SIGTERM, lambda *_: (write('step', 'final', outcome='stopped'), sys.exit(130)))\n"
        "(run / 'log').mkdir(); (home / 'ready').touch()\n"
        "while True: time.sleep(0.02)",
    )

    def interrupt() -> None:
        while not (sweep.home / "ready").exists():
            time.sleep(0.02)
        sweep.stop._on_signal(signal.SIGINT, None)

    threading.Thread(target=interrupt, daemon=True).start()
    assert sweep.run("0", "4") == 130
    assert sweep.starts == ["0-0 train"]
    assert sweep.said[0].startswith("1/2 max_staleness=0 seed=0: stopped at step 1")
    sweep.stop = StopRequest()
    assert sweep.run("0", "4") == 0
    assert sweep.starts == ["0-0 train", "0-0 train run.resume=true", "4-0 train"]


def test_sweep_may_grow_by_values_and_seeds(sweep: Sweep) -> None:
    sweep.run("0", "4")
    assert sweep.run("0", "2", "4", seeds=2) == 0
    assert sweep.starts == ["0-0 train", "4-0 train", "2-0 train", "0-1 train", "2-1 train", "4-1 train"]
    assert read_plan(sweep.folder) == Plan({"staleness.max_staleness": ["0", "2", "4"]}, [0, 1])


@pytest.mark.parametrize(
    ("varied", "seeds", "overrides", "said"),
    [
        (["max_staleness=0,8"], 2, [], "staleness.max_staleness is 0, 4 there and 0, 8 here"),
        (["max_staleness=0,4"], 1, [], "run.seed is 0, 1 there and 0 here"),
        (["max_staleness=0,4"], 2, ["train.num_steps=2"], "train.num_steps is 1 there and 2 here"),
        (["groups_per_step=8"], 2, [], "staleness.max_staleness is 0, 4 there and not varied here"),
        (["max_staleness=0,4", "groups_per_step=8"], 2, [], "train.groups_per_step is not varied there and 8 here"),
    ],
)
def test_another_sweep_in_the_same_folder_is_refused_with_what_differs(
    sweep: Sweep, varied: list[str], seeds: int, overrides: list[str], said: str
) -> None:
    sweep.cells("0", "4", seeds=2)
    before = sorted(sweep.folder.rglob("*"))
    plan = make_plan(varied, num_seeds=seeds, first_seed=0)
    with pytest.raises(SettingError, match="it holds another sweep") as raised:
        prepare(plan, make_cells(plan, sweep.home / "run.toml", overrides, sweep.folder), sweep.folder)
    assert said in str(raised.value)
    assert sorted(sweep.folder.rglob("*")) == before


def test_other_order_of_settings_is_another_sweep(sweep: Sweep) -> None:
    sweep.folder.mkdir()
    for order, is_same in ((["max_staleness=4", "groups_per_step=8"], True), (["groups_per_step=8", "max_staleness=4"], False)):
        plan = make_plan(order, num_seeds=1, first_seed=0)
        cells = make_cells(plan, sweep.home / "run.toml", [], sweep.folder)
        if is_same:
            prepare(plan, cells, sweep.folder)
        else:
            with pytest.raises(SettingError, match="the settings are varied in the order"):
                prepare(plan, cells, sweep.folder)


def test_folder_may_be_named_in_another_way(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep.run("0")
    monkeypatch.chdir(sweep.home)
    sweep.folder = Path("sweep")
    assert sweep.run("0") == 0
    assert len(sweep.starts) == 1


def test_two_sweeps_do_not_work_in_one_folder(sweep: Sweep) -> None:
    def run_another() -> None:
        with pytest.raises(SettingError, match="another sweep or study is running there"):
            sweep.run("0")

    sweep.on_report = run_another
    assert sweep.run("0") == 0
    sweep.on_report = lambda: None
    assert sweep.run("0") == 0


def test_folder_without_a_plan_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"it has no plan.json"):
        read_plan(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(SettingError, match=r"its plan.json is damaged"):
        read_plan(tmp_path)


def test_printed_commands_are_those_that_are_not_done_and_resume_what_broke_off(sweep: Sweep) -> None:
    sweep.does("4-0", "write('step'); (run / 'log').mkdir(); sys.exit(3)")
    sweep.does("8-0", "write('step'); sys.exit(3)")
    sweep.run("0", "4", "8")
    lines = render_commands(sweep.cells("0", "4", "8", "16"), sweep.folder, as_job=False).splitlines()
    root = sweep.folder / "max_staleness="
    assert lines == [
        f"offbeat train {root}4/seed=0/run.toml run.resume=true",
        f"rm {root}8/seed=0/metrics.jsonl && offbeat train {root}8/seed=0/run.toml",
        f"offbeat train {root}16/seed=0/run.toml",
    ]


def test_job_array_runs_one_command_in_each_task(sweep: Sweep) -> None:
    cells = sweep.cells("0", "4", overrides=["model.path=it's"])
    script = render_commands(cells, sweep.folder, as_job=True)
    assert "#SBATCH --array=0-1\n" in script
    with tempfile.TemporaryDirectory() as folder:
        offbeat = Path(folder) / "offbeat"
        offbeat.write_text('#!/bin/sh\necho "$@"\n')
        offbeat.chmod(0o755)
        told = subprocess.run(
            ["bash", "-c", script],
            env={"PATH": f"{folder}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
    assert told.stdout == f"train {cells[1].folder}/run.toml\n"


@pytest.mark.slow
def test_command_prints_the_quick_starts_runs_and_reports_what_is_there(sweep: Sweep) -> None:
    def offbeat(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "offbeat.deploy.cli", "sweep", *arguments, "--out", "sweep"]
        return subprocess.run(command, cwd=sweep.home, capture_output=True, text=True, timeout=60, check=False)

    printed = offbeat("train.num_steps=5", "--set", "max_staleness=0,4", "--seeds", "1", "--print")
    assert printed.stdout.splitlines() == [f"offbeat train sweep/max_staleness={bound}/seed=0/run.toml" for bound in (0, 4)]
    assert load(sweep.folder / "max_staleness=4" / "seed=0" / "run.toml").train.num_steps == 5
    assert "when they are: offbeat sweep --report --out sweep" in printed.stderr
    assert offbeat("--report").stdout == "sweep/report.html\n"


def test_plan_is_json_that_says_what_is_varied(sweep: Sweep) -> None:
    sweep.cells("0", "4", seeds=2)
    told = msgspec.json.decode((sweep.folder / "plan.json").read_bytes())
    assert told == {"settings": {"staleness.max_staleness": ["0", "4"]}, "seeds": [0, 1]}
