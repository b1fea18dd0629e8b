"""Claims about `learner.reporting.terminal`."""

import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from offbeat.common.records.rows import ActorRow, CommitRow, EpochRow, EventRow, FinalRow, LedgerSums, StepRow
from offbeat.learner.reporting.terminal import Progress, sparkline

ROOT = Path(__file__).parents[3]


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def step_row(version: int, time: float, **numbers: float) -> StepRow:
    metrics = {"reward/mean": version / 10, "lag/mean": 1.25, "lag/max": 3, "clip/fraction": 0.021, "loss/grad_norm": 0.5}
    metrics |= {"tokens/trained": 3000, "time/step_s": 2.0, "time/wait_rollouts_s": 0.5, "time/train_s": 1.4}
    return StepRow(time=time, policy_version=version, metrics=metrics | {"time/prepare_s": 0.0} | numbers)


def actor_row(name: str, time: float, tokens: int, **seconds: float) -> ActorRow:
    return ActorRow(
        time=time,
        actor=name,
        policy_version=4,
        num_generated_tokens=tokens,
        num_groups_sent=1,
        num_running_completions=8,
        seconds=seconds,
    )


def event_row(event: str, actor: str) -> EventRow:
    return EventRow(time=1000.0, event=event, detail="", actor=actor)


FINAL = FinalRow(time=1.0, policy_version=10, wall_s=200.0, ledger=LedgerSums(0, 0, {}, 0, 0), outcome="finished", detail="")


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=100)


def rendered(progress: Progress) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(progress.render())
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_without_a_terminal_lines_come_at_most_every_two_seconds(caplog: pytest.LogCaptureFixture):
    clock = FakeClock()
    with caplog.at_level(logging.INFO), Progress(10, console=plain_console(), clock=clock) as progress:
        for version in range(1, 11):
            clock.now += 0.5
            progress.add(step_row(version, clock.now))
    steps = [record.message.split("  ")[0] for record in caplog.records if record.message.startswith("step")]
    assert steps == ["step 1/10", "step 5/10", "step 9/10", "step 10/10"], "every 2 s, and the last one always"


def test_plain_line_names_reward_drift_rates_and_what_the_learner_waits_for(caplog: pytest.LogCaptureFixture):
    clock = FakeClock()
    with caplog.at_level(logging.INFO), Progress(10, console=plain_console(), clock=clock) as progress:
        progress.add(actor_row("a0", 996.0, 1000))
        progress.add(actor_row("a0", 1000.0, 5000))
        progress.add(step_row(4, clock.now))
    assert caplog.records[0].message == (
        "step 4/10  reward 0.400  lag 1.2 (max 3)  clipped 2.1%  grad norm 0.5  "
        "1,000 tok/s generated, 1,500 trained  trains 70%, waits for rollouts 25%"
    )


def test_display_shows_every_actor_with_version_rate_and_state():
    clock = FakeClock()
    progress = Progress(10, console=plain_console(), clock=clock)
    for name, work in (("a0", "generate"), ("a1", "wait_rewards"), ("a2", "generate")):
        progress.add(actor_row(name, 998.0, 0, **{work: 1.0}))
        progress.add(actor_row(name, 1000.0, 500, **{work: 2.9, "other": 0.1}))
    progress.add(event_row("actor_lost", "a2"))
    lines = [line.split() for line in rendered(progress).splitlines()[-3:]]
    assert lines == [
        ["a0", "version", "4", "250", "tok/s", "generates"],
        ["a1", "version", "4", "250", "tok/s", "waits", "for", "rewards"],
        ["a2", "version", "4", "lost"],
    ]
    assert "500 tok/s generated" in rendered(progress), "the lost actor's rate is not counted"
    clock.now += 7
    assert "silent for 7.0 s" in rendered(progress)


def test_restarted_actor_has_no_negative_rate():
    progress = Progress(10, console=plain_console(), clock=FakeClock())
    progress.add(actor_row("a0", 998.0, 9000))
    progress.add(actor_row("a0", 999.0, 100))
    progress.add(actor_row("a0", 1000.0, 400))
    assert "300 tok/s generated" in rendered(progress)


def test_actor_without_weights_has_no_version_yet():
    progress = Progress(10, console=plain_console(), clock=FakeClock())
    progress.add(msgspec.structs.replace(actor_row("a0", 1000.0, 0), policy_version=None))
    assert "no weights yet" in rendered(progress)


def test_excluded_actor_is_well_again_after_its_next_commit():
    progress = Progress(10, console=plain_console(), clock=FakeClock())
    progress.add(event_row("actor_excluded", "a0"))
    assert "excluded" in rendered(progress)
    progress.add(CommitRow(time=2.0, actor="a0", policy_version=9, stall_s=0.1))
    assert "excluded" not in rendered(progress)
    assert "version 9" in rendered(progress)


def test_of_many_actors_the_lost_ones_stay_in_sight():
    progress = Progress(10, console=plain_console(), clock=FakeClock())
    for index in range(20):
        progress.add(actor_row(f"a{index:02}", 1000.0, 0))
    progress.add(event_row("actor_lost", "a19"))
    text = rendered(progress)
    assert "a19" in text
    assert "and 8 more" in text


def test_actors_that_left_hide_none_that_is_at_work():
    progress = Progress(10, console=plain_console(), clock=FakeClock())
    for index in range(13):
        progress.add(event_row("actor_left", f"a{index:02}"))
    progress.add(actor_row("b0", 1000.0, 0))
    progress.add(event_row("actor_lost", "b1"))
    text = rendered(progress)
    assert "b0" in text
    assert "b1" in text
    assert "and 3 more" in text


def test_stalled_learner_says_for_how_long():
    clock = FakeClock()
    progress = Progress(10, console=plain_console(), clock=clock)
    assert "waits for the first rollouts" in rendered(progress)
    progress.add(step_row(1, clock.now))
    clock.now += 65
    assert "no step for 1 min 05 s" in rendered(progress)


def test_actor_name_with_brackets_is_not_markup():
    progress = Progress(10, console=plain_console(), clock=FakeClock())
    progress.add(actor_row("node[3]", 1000.0, 0))
    assert "node[3]" in rendered(progress)


def test_numbers_that_are_missing_or_null_do_not_stop_the_display(caplog: pytest.LogCaptureFixture):
    progress = Progress(10, console=plain_console(), clock=FakeClock())
    with caplog.at_level(logging.INFO):
        progress.add(StepRow(time=1000.0, policy_version=1, metrics={"reward/mean": None}))
        progress.add(step_row(2, 1000.0, **{"reward/mean": float("nan"), "loss/grad_norm": float("inf")}))
        progress.add(EpochRow(time=1000.0, epoch=0, num_trained=0, dropped={}))
    assert "reward –" in caplog.text
    assert "reward" in rendered(progress)


def test_end_line_holds_outcome_reward_and_wall_time(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO), Progress(10, console=plain_console(), clock=FakeClock()) as progress:
        progress.add(step_row(10, 1000.0))
        progress.add(FINAL)
    assert caplog.records[-1].message == "finished: step 10/10, reward 1.000, 3 min 20 s"


def test_end_line_of_a_run_that_raised_names_the_error(caplog: pytest.LogCaptureFixture):
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(KeyError),
        Progress(10, console=plain_console(), clock=FakeClock()) as progress,
    ):
        progress.add(step_row(3, 1000.0))
        raise KeyError("x")
    assert caplog.records[-1].message == "failed (KeyError): step 3/10, reward 0.300, 0.0 s"


def test_rows_of_two_threads_may_be_shown_while_the_display_is_drawn():
    progress = Progress(200, console=plain_console(), clock=FakeClock())
    threads = [
        threading.Thread(target=lambda: [progress.add(step_row(v, 1000.0)) for v in range(200)]),
        threading.Thread(target=lambda: [progress.add(actor_row(f"a{i}", 1000.0, i)) for i in range(200)]),
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        rendered(progress)
    for thread in threads:
        thread.join()
    assert "step 199/200" in rendered(progress)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([3.0], "▁"),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([0.0, 0.0, 3.0, 4.0, 0.0, 1.0, 7.0, 7.0], "▁▅▁█"),
    ],
)
def test_sparkline_of_four_cells_spans_lowest_to_highest(values: list[float], line: str):
    assert sparkline(values, 4) == line


LIVE = """
import logging, sys, time
from offbeat.common.records.logs import configure_logs
from offbeat.common.records.rows import StepRow
from offbeat.learner.reporting.terminal import Progress
configure_logs("learner")

class Counted(Progress):
    num_frames = 0

    def render(self):
        self.num_frames += 1
        return super().render()

    def show(self):
        shown = self.num_frames
        while self.num_frames < shown + 2:
            time.sleep(0.01)

with Counted(10) as progress:
    progress.add(StepRow(time=time.time(), policy_version=4, metrics={"reward/mean": 0.5, "time/step_s": 1.0}))
    progress.show()
    logging.getLogger("offbeat.learner.hub").info("actor a1 joined")
    print("printed by user code")
    progress.show()
"""


def test_log_lines_do_not_tear_the_live_display():
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen([sys.executable, "-c", LIVE], cwd=ROOT, env=environment, stdout=theirs, stderr=theirs):
        os.close(theirs)
        raw = b""
        while chunk := read_terminal(ours):
            raw += chunk
    os.close(ours)
    screen = play(raw.decode(), height=30)
    without_time = [re.sub(r"^[\d:]+ (AM|PM)? *|, [\d.]+ (s|min \d+ s)$", "", line) for line in screen]
    assert without_time == [
        "INFO     learner  actor a1 joined",
        "printed by user code",
        "INFO     learner  ended: step 4/10, reward 0.500",
    ]


def read_terminal(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:
        # EIO is how a terminal says that its other side is closed.
        return b""


def play(text: str, height: int) -> list[str]:
    """Return the non-empty lines that a terminal shows after these bytes, interpreting the controls that rich uses."""
    rows, row = [""] * height, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
        elif token == "\r":
            pass
        elif token.startswith("\x1b"):
            count, control = token[2:-1], token[-1]
            if control == "A":
                row -= int(count or 1)
            elif control == "K":
                rows[row] = ""
        else:
            rows[row] += token
    return [line.rstrip() for line in rows if line.strip()]


def test_trouble_is_a_line_of_the_display_until_it_is_cleared():
    progress = Progress(10, console=plain_console(), clock=FakeClock())
    progress.add(EventRow(time=1.0, event="health", detail="Everything is cut. Raise rollout.max_new_tokens.", rule="all_cut"))
    assert "! Everything is cut. Raise rollout.max_new_tokens." in rendered(progress)
    progress.add(EventRow(time=2.0, event="health_cleared", detail="", rule="all_cut"))
    assert "!" not in rendered(progress)
