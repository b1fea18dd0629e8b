"""`offbeat reconcile`: keeps as many actors in a pool as a run wants."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.errors import SettingError
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import configure_logs
from offbeat.common.settings.config import Config
from offbeat.deploy.cli.arguments import Operator, read_config_of_run
from offbeat.deploy.clusters.kubernetes_pool import open_kubernetes_pool
from offbeat.deploy.clusters.pool import Pool, reconcile
from offbeat.deploy.clusters.ray_pool import open_ray_pool
from offbeat.deploy.clusters.slurm import open_pool
from offbeat.deploy.operating.link import ask, open_link_to
from offbeat.lab.ended_run import read_end
from offbeat.protocols.messages import StatusReport, StatusRequest

logger = logging.getLogger(__name__)

OpenPool = Callable[[Config, str], Pool]
"""A function that opens a pool for a run's settings, with the PLACE of `--on KIND:PLACE`, which may be empty."""
POOLS: dict[str, OpenPool] = {"slurm": open_pool, "kubernetes": open_kubernetes_pool, "ray": open_ray_pool}
"""The kinds of pools by the name that `--on` takes."""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder or its TOML file.")],
    on: Annotated[
        str,
        typer.Option(
            metavar="KIND:PLACE",
            help="slurm:DIR, with the folder that `offbeat deploy slurm` wrote; kubernetes, in a pod: the Deployment actor; "
            "ray, on a node of the cluster, or ray:ADDRESS.",
        ),
    ],
    operator: Operator = "operator",
) -> None:
    """Keep as many actors running on a cluster as the run wants. `offbeat scale` and scale.auto change the number.

    Run one such process beside the learner, until the run ends. `offbeat train` does the same for actors on its machine.
    """
    configure_logs("reconcile")
    kind, _, place = on.partition(":")
    if kind not in POOLS:
        raise SettingError("--on", on, "there is no such kind of pool", f"Choose one of {', '.join(POOLS)}.")
    config = read_config_of_run([str(run)])
    open_link, address = open_link_to(config.hub, operator), config.hub.address
    folder = run if run.is_dir() else Path(config.run.dir)
    stop = StopRequest().install()
    pool = POOLS[kind](config, place)

    def ask_learner() -> StatusReport:
        with open_link() as link:
            return ask(link, address, StatusRequest(), StatusReport)

    def has_ended() -> bool:
        ended = read_end(folder)
        return ended is not None and ended.outcome is not None

    reconcile(pool, ask_learner, has_ended, stop)
