"""`offbeat chaos`: runs under faults."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import configure_logs
from offbeat.deploy.chaos.chaos import print_chaos, run_chaos
from offbeat.deploy.cli.arguments import QUICKSTART, Arguments, split_arguments, start_time

logger = logging.getLogger(__name__)


def command(
    arguments: Arguments = None,
    seed: Annotated[int, typer.Option(help="Decides which faults happen, and when.")] = 0,
    minutes: Annotated[float, typer.Option(help="Time in which rounds are started; the last one is finished.")] = 2.0,
) -> None:
    """Run the quick start, or CONFIG, under faults: kills, stops, cuts, a corrupted log, a full disk; then audit what it left.

    Exit status 1 when anything is wrong. As root it makes a network namespace and a small disk for itself.
    """
    configure_logs("chaos")
    path, overrides = split_arguments(arguments)
    is_quickstart, path = path is None, path or QUICKSTART
    folder = Path(f"runs/chaos-{start_time()}")
    stop = StopRequest().install()
    report = run_chaos(path, overrides, is_quickstart=is_quickstart, seed=seed, minutes=minutes, folder=folder, stop=stop)
    print_chaos(report)
    logger.info("all findings: %s", folder / "chaos.json")
    raise typer.Exit(130 if stop else 0 if report.is_good else 1)
