"""`offbeat trace`: the lease histories of a run as a trace."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.errors import SettingError
from offbeat.deploy.cli.arguments import RunFolder
from offbeat.lab.tracing import TRACE_FILE, TraceRequest, read_trace, send_trace, write_trace


def command(
    run: RunFolder,
    lease: Annotated[int | None, typer.Option(metavar="N", help="Only the lease with this id.")] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Only the groups of this optimizer step, counted from 1.")
    ] = None,
    slowest: Annotated[int, typer.Option(min=1, help="Number of slowest groups to show, without --lease and --step.")] = 20,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Send the spans to this OTLP collector instead, as http://HOST:4318.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write. [default: RUN/trace.json]")] = None,
) -> None:
    """Write a trace of groups for ui.perfetto.dev: the wait, generation, reward, queue and training of each."""
    if lease is not None and step is not None:
        raise SettingError("--lease", lease, "it contradicts --step", "Give one of them.")
    trace = read_trace(run, TraceRequest(lease, step, slowest))
    if otlp is not None:
        typer.echo(f"{send_trace(trace, otlp)} spans sent to {otlp}")
        return
    typer.echo(write_trace(trace, out or run / TRACE_FILE))
