"""`offbeat trace`: the lives of some groups of a run, with the learner's work at that time.

rollout log -> lives -> spans -> file, or collector
metrics.jsonl -> learner's work -^
"""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from offbeat.common.errors import SettingError
from offbeat.common.records.run_folder import LOG, read_run_config
from offbeat.common.records.writer import ROWS_FILE, read_rows
from offbeat.lab.tracing.learner_work import Work
from offbeat.lab.tracing.lives import choose, life_span, read_lives
from offbeat.lab.tracing.perfetto import trace_file
from offbeat.lab.tracing.spans import Process, Span, within
from offbeat.learner.leases.log_reading import read_log

TRACE_FILE = "trace.json"


class Request(NamedTuple):
    """The groups to show: of one lease, of one step, or the slowest ones."""

    lease: int | None
    step: int | None
    slowest: int


class Trace(NamedTuple):
    """Some groups of a run with what else happened then."""

    run_id: str
    processes: tuple[Process, ...]


def read_trace(run: Path, request: Request) -> Trace:
    """Return the trace that is asked for; raise `SettingError` for a run without a log or such groups."""
    config = read_run_config(run)
    if not (run / LOG).is_dir():
        raise SettingError("RUN", str(run), "it has no rollout log", "Runs with log.enabled=true can be traced.")
    lives = read_lives((record.event for record in read_log(run / LOG)), config.train.groups_per_step)
    of_actors: defaultdict[str, list[Span]] = defaultdict(list)
    for life in choose(lives, lease=request.lease, step=request.step, slowest=request.slowest):
        of_actors[life.granted.actor].append(life_span(life))
    shown = [span for spans in of_actors.values() for span in spans]
    start, end = min(span.start for span in shown), max(span.end for span in shown)
    rows = run / ROWS_FILE
    work = Work(read_rows(rows) if rows.is_file() else ()).processes(lives.batches)
    beside = [Process(name, tuple(span for span in spans if within(span, start, end))) for name, spans in work]
    groups = [Process(name, tuple(spans)) for name, spans in sorted(of_actors.items())]
    return Trace(lives.run_id, tuple(process for process in (*beside, *groups) if process.spans))


def write_trace(trace: Trace, out: Path) -> Path:
    """Write the trace as a file for Perfetto, and return its path."""
    try:
        out.write_bytes(trace_file(trace.processes))
    except OSError as error:
        raise SettingError("--out", str(out), f"it cannot be written ({error.strerror})", "Name another file.") from error
    return out
