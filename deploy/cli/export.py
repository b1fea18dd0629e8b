"""`offbeat export`: a model's folder from a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.processes.environment import prepare_environment
from offbeat.common.records.logs import configure_logs
from offbeat.deploy.cli.arguments import RunFolder
from offbeat.lab.export import export


def command(
    run: RunFolder,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Optimizer step of the checkpoint. [default: the newest complete one]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to create. [default: RUN/model-step-N, or RUN/adapter-step-N]")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Export only the LoRA adapter, in peft's layout.")] = False,
) -> None:
    """Save the model of a checkpoint for transformers and vLLM. The run may still be going."""
    configure_logs("export")
    prepare_environment()
    typer.echo(export(run, step=step, out=out, only_adapter=adapter))
