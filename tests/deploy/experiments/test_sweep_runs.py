"""About `deploy.experiments.sweep_runs`: a sweep makes, resumes, restarts, stops and refuses runs; a stand-in makes them."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offbeat.common.errors import SettingError
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.settings.loading import load
from offbeat.deploy.checks import preflight
from offbeat.deploy.cli.main import make_app
from offbeat.deploy.experiments import sweep_runs
from offbeat.deploy.experiments.jobs import FolderBusyError, alone_in
from offbeat.deploy.experiments.sweep_runs import MachinePart, render_commands, run_sweep
from offbeat.deploy.experiments.trials import SweepTrial, render_job_array
from offbeat.lab.sweep.plan import Hopeless, Plan, read_hopeless, read_plan
from tests.deploy.experiments.sweeps import Sweep
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


def interrupt_when_ready(sweep: Sweep) -> None:
    """Ask the sweep to stop as soon as one of its runs has made the file `ready`."""

    def interrupt() -> None:
        while not (sweep.home / "ready").exists():
            time.sleep(0.02)
        sweep.stop._on_signal(signal.SIGINT, None)

    threading.Thread(target=interrupt, daemon=True).start()


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
    assert sweep.said[0] == "1/2 runs are done already"
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
        "0-0.2",
        "assert sorted(path.name for path in run.iterdir()) == ['.lock', 'run.toml', 'train.log']\nwrite('step', 'final')",
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
    interrupt_when_ready(sweep)
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


def test_folder_may_be_named_in_another_way(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep.run("0")
    monkeypatch.chdir(sweep.home)
    sweep.folder = Path("sweep")
    assert sweep.run("0") == 0
    assert len(sweep.starts) == 1


@pytest.mark.parametrize("shard", [slice(None), slice(1, None, 2)])
def test_two_sweeps_do_not_make_the_same_run(sweep: Sweep, shard: slice) -> None:
    def run_another() -> None:
        sweep.on_say = lambda: None
        with pytest.raises(SettingError, match="another sweep or study is running there"):
            sweep.run("0", "4", shard=shard)

    sweep.on_say = run_another
    assert sweep.run("0", "4") == 0
    assert sweep.starts == ["0-0 train", "4-0 train"]
    assert sweep.run("0", "4") == 0


def test_printed_commands_are_those_that_are_not_done_and_resume_what_broke_off(sweep: Sweep) -> None:
    sweep.does("4-0", "write('step'); (run / 'log').mkdir(); sys.exit(3)")
    sweep.does("8-0", "write('step'); (run / 'model').mkdir(); sys.exit(3)")
    sweep.run("0", "4", "8")
    lines = render_commands(sweep.trials("0", "4", "8", "16"), sweep.folder).splitlines()
    root = sweep.folder / "max_staleness="
    assert lines == [
        f"offbeat train {root}4/seed=0/run.toml run.resume=true",
        f"rm -r {root}8/seed=0/metrics.jsonl {root}8/seed=0/model && offbeat train {root}8/seed=0/run.toml",
        f"offbeat train {root}16/seed=0/run.toml",
    ]


def test_job_array_has_a_task_for_each_run_that_is_left(sweep: Sweep) -> None:
    sweep.run("4")
    trials = sweep.trials("0", "4", "8", "16")
    script = render_job_array(trials, Path("50%array"), ["offbeat", "sweep", "it's.toml", "--out", "a b"])
    assert "#SBATCH --output=50%%array/slurm-%a.log\n" in script
    assert "#SBATCH --array=0,2-3\n" in script
    with tempfile.TemporaryDirectory() as folder:
        offbeat = Path(folder) / "offbeat"
        offbeat.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
        offbeat.chmod(0o755)
        told = subprocess.run(
            ["bash", "-c", script],
            env={"PATH": f"{folder}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "2"},
            capture_output=True,
            text=True,
            check=True,
        )
    assert told.stdout == "sweep|it's.toml|--out|a b|--shard|2/4|"


def test_job_array_without_a_run_that_is_left_is_refused(sweep: Sweep) -> None:
    sweep.run("4")
    with pytest.raises(SettingError, match="every run of the sweep has ended"):
        render_job_array(sweep.trials("4"), sweep.folder, ["offbeat", "sweep"])


def test_shards_make_each_run_once_in_one_sweep(sweep: Sweep) -> None:
    for index in range(2):
        assert sweep.run("0", "4", shard=slice(index, None, 2)) == 0
    assert sorted(sweep.starts) == ["0-0 train", "4-0 train"]
    assert read_plan(sweep.folder) == sweep.plan("0", "4")
    assert sweep.run("0", "4") == 0
    assert sweep.said == ["2/2 runs are done already"]


def test_no_more_runs_are_under_way_than_there_are_places(sweep: Sweep) -> None:
    sweep.does(
        "any",
        """
mark = home / f"under-way-{name}"
mark.touch()
time.sleep(0.3)
with (home / "seen").open("a") as file:
    print(len(list(home.glob("under-way-*"))), file=file)
mark.unlink()
write("step", "final")
""",
    )
    assert sweep.run("0", "4", "8", "16", num_at_once=2) == 0
    assert len(sweep.starts) == 4
    assert set((sweep.home / "seen").read_text().split()) <= {"1", "2"}
    assert [line.split()[0] for line in sweep.said] == [f"{number}/4" for number in range(1, 5)]


def test_runs_at_once_have_their_own_cores_and_gpus(sweep: Sweep) -> None:
    sweep.does(
        "any",
        """
(run / "place").write_text(f"{sorted(os.sched_getaffinity(0))} {os.environ['CUDA_VISIBLE_DEVICES']}")
(home / f"here-{name}").touch()
while len(list(home.glob("here-*"))) < 2:
    time.sleep(0.02)
write("step", "final")
""",
    )
    core = min(os.sched_getaffinity(0))
    places = [MachinePart((core,), ("GPU-a", "GPU-b")), MachinePart((core,), ("3",))]
    trials = sweep.trials("0", "4")
    status = run_sweep(
        trials,
        sweep.folder,
        sweep.stop,
        say=sweep.said.append,
        write_report=lambda: sweep.folder,
        places=places,
        program=sweep.program,
    )
    assert status == 0
    assert {(trial.folder / "place").read_text() for trial in trials} == {f"[{core}] GPU-a,GPU-b", f"[{core}] 3"}


FALLS = """
def leave(*_):
    write("step", "final", outcome="stopped")
    (run / "model").mkdir()
    sys.exit(130)
signal.signal(signal.SIGTERM, leave)
row("eval", policy_version=0, reward=0.5, length=1.0, num_completions=8, num_failed=0)
for version in range(20, 81, 20):
    row("eval", policy_version=version, reward=0.25, length=1.0, num_completions=8, num_failed=0)
(run / "log").mkdir()
deadline = time.monotonic() + WAIT
while time.monotonic() < deadline:
    time.sleep(0.02)
write("step", "final")
"""
"""A run that is hopeless at once, and ends by itself after so many seconds."""


def test_hopeless_run_is_asked_to_stop_and_has_ended(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_runs, "JUDGE_S", 0.1)
    sweep.does("4-0", FALLS.replace("WAIT", "60"))
    assert sweep.run("0", "4", stops_hopeless=True) == 0
    said = "stopped as hopeless: reward 0.25 at step 80, 0.5 before the first"
    assert sweep.said[1].startswith(f"2/2 max_staleness=4 seed=0: {said}, reward 0.5")
    folder = sweep.folder / "max_staleness=4" / "seed=0"
    assert read_hopeless(folder) == Hopeless(80, 0.25, 0.5)
    assert (folder / "model").exists(), "it stopped in order"
    assert sweep.run("0", "4", stops_hopeless=True) == 0
    assert sweep.run("0", "4") == 0
    assert sweep.starts == ["0-0 train", "4-0 train"], "it is not taken up again"
    assert render_commands(sweep.trials("0", "4"), sweep.folder) == ""


def test_hopeless_run_goes_on_unless_it_is_to_be_stopped(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_runs, "JUDGE_S", 0.1)
    sweep.does("4-0", FALLS.replace("WAIT", "0.5"))
    assert sweep.run("4") == 0
    assert "finished" in sweep.said[0]
    assert read_hopeless(sweep.folder / "max_staleness=4" / "seed=0") is None


def test_run_that_does_not_stop_is_killed(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_runs, "STOP_S", 0.3)
    sweep.does("0-0", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(home / 'ready').touch()\nwhile True: time.sleep(0.02)")
    interrupt_when_ready(sweep)
    assert sweep.run("0") == 130
    assert "exit status -9" in sweep.said[0]


UNTIL_ASKED = """
signal.signal(signal.SIGTERM, lambda *_: (write('step', 'final', outcome='stopped'), sys.exit(130)))
(home / 'ready').touch()
while True: time.sleep(0.02)
"""


def test_error_in_the_thread_of_a_run_stops_those_under_way_in_order(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep.does("4-0", UNTIL_ASKED)

    def clean(trial: SweepTrial) -> None:
        if "max_staleness=0" in trial.name:
            wait_for((sweep.home / "ready").exists)
            raise OSError("no space is left")

    monkeypatch.setattr(sweep_runs, "_clean", clean)
    with pytest.raises(OSError, match="no space is left"):
        sweep.run("0", "4", num_at_once=2)
    rows = (sweep.folder / "max_staleness=4" / "seed=0" / "metrics.jsonl").read_text()
    assert '"outcome":"stopped"' in rows


def test_error_of_the_sweep_stops_the_runs_under_way_in_order(sweep: Sweep) -> None:
    # 4-0 runs until it is asked to stop; the end of 0-0 fails.
    sweep.does("4-0", UNTIL_ASKED)
    sweep.does("0-0", "while not (home / 'ready').exists(): time.sleep(0.02)\nwrite('step', 'final')")

    def fail() -> None:
        raise OSError("no space is left")

    sweep.on_say = fail
    with pytest.raises(OSError, match="no space is left"):
        sweep.run("0", "4", num_at_once=2)
    rows = (sweep.folder / "max_staleness=4" / "seed=0" / "metrics.jsonl").read_text()
    assert '"outcome":"stopped"' in rows


def test_report_that_another_shard_writes_is_left_to_it_until_the_end(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_runs, "REPORT_S", 0.2)
    with alone_in(sweep.folder, name=sweep_runs.REPORT_LOCK), pytest.raises(FolderBusyError):
        sweep.run("0", "4")
    assert sweep.num_reports == 0
    assert len(sweep.starts) == 2, "the runs were made"


@pytest.mark.slow
def test_command_prints_the_quick_starts_runs_and_reports_what_is_there(sweep: Sweep) -> None:
    def offbeat(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "offbeat.deploy.cli.main", "sweep", *arguments, "--out", "sweep"]
        return subprocess.run(command, cwd=sweep.home, capture_output=True, text=True, timeout=60, check=False)

    printed = offbeat("train.num_steps=5", "--set", "max_staleness=0,4", "--seeds", "1", "--print")
    assert printed.stdout.splitlines() == [f"offbeat train sweep/max_staleness={bound}/seed=0/run.toml" for bound in (0, 4)]
    assert load(sweep.folder / "max_staleness=4" / "seed=0" / "run.toml").train.num_steps == 5
    assert "when they are: offbeat sweep --report --out sweep" in printed.stderr
    assert offbeat("--report").stdout == "sweep/report.html\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shard", "0/2"], "all parts need the same folder"),
        (["--shard", "2/2", "--out", "sweep"], "it is not I/N with I from 0 to N - 1"),
        (["--slurm", "--shard", "0/2", "--out", "sweep"], "each task of the array is a shard"),
        (["--slurm", "--jobs", "2"], "each task of the array is a shard"),
        (["--jobs", "1000"], "each run needs a core of its own"),
        (["--jobs", "2", "weights.port=5701"], "cannot share the port"),
        (["--baseline", "objective=gspo"], "the sweep does not vary this setting"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SettingError, match=said):
        CliRunner().invoke(make_app(), ["sweep", "--set", "max_staleness=0,4", *arguments], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def test_array_of_the_command_repeats_what_the_sweep_is(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sweep.home)
    arguments = ["run.toml", "train.num_steps=5", "--set", "max_staleness=0,4", "--set", "objective=gspo,grpo", "--seeds", "1"]
    arguments += ["--out", "sweep", "--baseline", "objective=gspo", "--difference", "0.05", "--stop-hopeless"]
    script = CliRunner().invoke(make_app(), ["sweep", *arguments, "--slurm"], catch_exceptions=False).output
    command = next(line for line in script.splitlines() if line.startswith("exec "))
    told = shlex.split(command)
    assert told[:3] == ["exec", "offbeat", "sweep"]
    assert told[-2:] == ["--shard", "$SLURM_ARRAY_TASK_ID/4"]
    monkeypatch.setattr(sweep_runs, "run_sweep", lambda *arguments, **options: made.append((arguments, options)) or 0)
    monkeypatch.setattr(preflight, "look", lambda config, command: None)
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    again = [*told[3:-1], "2/4"]
    assert CliRunner().invoke(make_app(), ["sweep", *again], catch_exceptions=False).exit_code == 0
    (((trials, *_, write_report), options),) = made
    assert [trial.name for trial in trials] == ["max_staleness=4/objective=gspo/seed=0"]
    assert trials[0].config.train.num_steps == 5
    assert options["stops_hopeless"]
    assert write_report.args == (Path("sweep"), 0.05, ["objective=gspo"])
