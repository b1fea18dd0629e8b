"""`offbeat calibrate`: the noise between engine and learner, and a clip band above it."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from offbeat.common.processes.environment import prepare_environment
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import configure_logs
from offbeat.common.settings.loading import refuse_masked
from offbeat.deploy.checks.preflight import look
from offbeat.deploy.cli.arguments import QUICKSTART, Arguments, load_config, start_time
from offbeat.deploy.local.quickstart.prepared import expand


def command(
    arguments: Arguments = None,
    groups: Annotated[int, typer.Option(min=2, help="Groups to sample.")] = 128,
    out: Annotated[Path | None, typer.Option(help="Folder for the result. [default: runs/calibrate-TIME]")] = None,
    reuse: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Do not sample: score what this run sampled with its initial weights.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the calibration as JSON.")] = False,
) -> None:
    """Measure how much engine and learner log-probs differ at lag 0, and recommend a clip range above that noise."""
    configure_logs("calibrate")
    prepare_environment()
    config = expand(load_config(arguments, default=QUICKSTART))
    refuse_masked(config)
    folder = out or Path(f"runs/calibrate-{start_time()}")
    config = replace(config, run=replace(config.run, dir=str(folder), resume=False))
    look(config, "train")
    # Imported last: torch takes seconds, and a mistake in the config is reported before.
    from offbeat.deploy.local.calibrating import calibrate, collect
    from offbeat.lab.calibration import print_calibration

    if reuse is None:
        status = collect(config, groups, StopRequest().install())
        if status:
            raise typer.Exit(status)
    print_calibration(calibrate(config, reuse or folder), folder, as_json=as_json)
