"""`python -m tests.chaos`: runs under faults, from the root of the repository."""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import configure_logs
from offbeat.deploy.cli.arguments import QUICKSTART, Arguments, split_arguments, start_time
from offbeat.deploy.cli.main import run
from tests.chaos.chaos import print_chaos, run_chaos

logger = logging.getLogger("offbeat.chaos")

ROOT = Path(__file__).parents[2]


def command(
    arguments: Arguments = None,
    seed: Annotated[int, typer.Option(help="Decides which faults happen, and when.")] = 0,
    minutes: Annotated[float, typer.Option(help="Time in which rounds are started; the last one is finished.")] = 2.0,
) -> None:
    """Run the quick start, or CONFIG, under faults: kills, stops, cuts, a corrupted log, a full disk; then audit what it left.

    Exit status 1 when anything is wrong. As root it makes a network namespace and a small disk for itself.
    """
    configure_logs("chaos")
    # Actors import the reward and the environment of chaos.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    path, overrides = split_arguments(arguments)
    is_quickstart, path = path is None, path or QUICKSTART
    folder = Path(f"runs/chaos-{start_time()}")
    stop = StopRequest().install()
    report = run_chaos(path, overrides, is_quickstart=is_quickstart, seed=seed, minutes=minutes, folder=folder, stop=stop)
    print_chaos(report)
    logger.info("all findings: %s", folder / "chaos.json")
    raise typer.Exit(130 if stop else 0 if report.is_good else 1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run(app)
