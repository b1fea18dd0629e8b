"""The commands for clusters: the files of a run for a scheduler, and the loop that keeps actors there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.errors import SettingError
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import configure_logs
from offbeat.common.records.run_folder import writing
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import refuse_masked
from offbeat.deploy.cli.arguments import QUICKSTART, Arguments, Operator, read_config, read_run, split_arguments
from offbeat.deploy.clusters.container import Document, read_mapping, write_compose
from offbeat.deploy.clusters.kubernetes_files import Cluster, write_manifests
from offbeat.deploy.clusters.kubernetes_pods import PodOptions, open_kubernetes_pool
from offbeat.deploy.clusters.pool import Pool, reconcile
from offbeat.deploy.clusters.ray_pool import open_ray_pool
from offbeat.deploy.clusters.slurm import open_pool, write_scripts
from offbeat.deploy.operating.link import ask_status, open_link_to
from offbeat.lab.run_summary import read_end

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files. Existing files are replaced, except keys.")]
Image = Annotated[str, typer.Option(metavar="NAME", help="Container image with offbeat, your code and data. Required.")]
PodWords = list[str] | None
WORDS_OF_POD = "RESOURCE=QUANTITY|FILE"


@app.callback()
def deploy_command() -> None:
    """Write the files with which a cluster runs learner and actors, from the run's TOML file."""
    configure_logs("deploy")


@app.command()
def slurm(
    out: Out,
    arguments: Arguments = None,
    learner_options: Annotated[
        list[str] | None,
        typer.Option("--learner", metavar="OPTIONS", help='Options of sbatch for the learner, such as "--gpus-per-node=1".'),
    ] = None,
    actor_options: Annotated[
        list[str] | None,
        typer.Option("--actor", metavar="OPTIONS", help='Options of sbatch for each actor, such as "--partition=spot".'),
    ] = None,
) -> None:
    """Write `learner.sbatch`, `actors.sbatch` and the keys of a run on Slurm. Run this in a folder that all nodes can see."""
    config = read_config(arguments)
    refuse_masked(config)
    path, overrides = split_arguments(arguments)
    assert path is not None, "read_config refuses a command line without a file"
    with writing(out, "--out"):
        told = write_scripts(config, path, overrides, out, learner_options or [], actor_options or [])
    typer.echo(told)


@app.command()
def kubernetes(
    out: Out,
    image: Image = "",
    arguments: Arguments = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the run. Each run needs its own.")] = "offbeat",
    learner: Annotated[
        PodWords,
        typer.Option(
            metavar=WORDS_OF_POD,
            help="Resource of the learner, such as nvidia.com/gpu=1, or a YAML file with fields of its pod: tolerations, ...",
        ),
    ] = None,
    actor: Annotated[PodWords, typer.Option(metavar=WORDS_OF_POD, help="The same for each actor: memory=32Gi.")] = None,
    secret: Annotated[str, typer.Option(help="Secret whose entries become environment variables, such as HF_TOKEN.")] = "",
    storage: Annotated[str, typer.Option(help="Size of the learner's volume.")] = "100Gi",
    storage_class: Annotated[str, typer.Option(help="Storage class of the volume. [default: the cluster's]")] = "",
    monitoring: Annotated[str, typer.Option(metavar="NAMESPACE", help="Namespace whose pods may read the run's metrics.")] = "",
    scaled_by: Annotated[
        str,
        typer.Option(
            metavar="reconcile|keda:URL",
            help="Scale the actors to the number that the run wants, by offbeat or by KEDA with the Prometheus at URL.",
        ),
    ] = "",
) -> None:
    """Write the manifests of a run on Kubernetes: learner, actors, keys, probes, and network policies."""
    scaler, _, prometheus = scaled_by.partition(":")
    if (scaler, bool(prometheus)) not in (("", False), ("reconcile", False), ("keda", True)):
        cure = "Write --scaled-by reconcile, or --scaled-by keda:URL with the address of Prometheus."
        raise SettingError("--scaled-by", scaled_by, "nothing of this kind scales actors", cure)
    path, overrides = _named_file(arguments)
    cluster = Cluster(
        image=_named_image(image),
        namespace=namespace,
        learner=_pod_options("--learner", learner, secret),
        actor=_pod_options("--actor", actor, secret),
        storage=storage,
        storage_class=storage_class,
        monitoring=monitoring,
        prometheus=prometheus,
        reconciles=scaler == "reconcile",
    )
    with writing(out, "--out"):
        told = write_manifests(path, overrides, out, cluster)
    typer.echo(told)


@app.command()
def compose(out: Out, image: Image = "", arguments: Arguments = None) -> None:
    """Write `compose.yaml`: the run in containers on one machine, with the actors and GPUs of `launch`."""
    path, overrides = _named_file(arguments)
    named = _named_image(image)
    with writing(out, "--out"):
        told = write_compose(path, overrides, out, named)
    typer.echo(told)


def _named_image(image: str) -> str:
    """Return the image that was given; raise `SettingError` where none was."""
    if not image:
        cure = "Build one in a clone of offbeat, `docker build -t NAME .`, and give --image NAME (docs/kubernetes.md)."
        raise SettingError("--image", "", "no container image with offbeat, your code and data is named", cure)
    return image


def _named_file(arguments: list[str] | None) -> tuple[Path, list[str]]:
    """Return the TOML file that a command line names, by default the quick start's, and the settings behind it."""
    path, overrides = split_arguments(arguments)
    return path or QUICKSTART, overrides


def _pod_options(option: str, words: PodWords, secret: str) -> PodOptions:
    """Return the choices about a pod by words that are `RESOURCE=QUANTITY` or name a YAML file of fields.

    Raises `SettingError` for another form.
    """
    quantities: dict[str, str] = {}
    fields: Document = {}
    for word in words or []:
        resource, is_quantity, quantity = word.partition("=")
        if not is_quantity:
            fields |= read_mapping(option, Path(word))
            continue
        if not re.fullmatch(r"[\w./-]+", resource) or not re.fullmatch(r"\d+(\.\d+)?(m|k|[MGTP]|[KMGTP]i)?", quantity):
            raise SettingError(option, word, "this is not RESOURCE=QUANTITY", f"Write for example {option} memory=32Gi.")
        quantities[resource] = quantity
    return PodOptions(quantities, fields, secret)


OpenPool = Callable[[Config, str], Pool]
"""A function that opens a pool for a run's settings, with the PLACE of `--on KIND:PLACE`, which may be empty."""
POOLS: dict[str, OpenPool] = {"slurm": open_pool, "kubernetes": open_kubernetes_pool, "ray": open_ray_pool}
"""The kinds of pools by the name that `--on` takes."""


def reconcile_command(
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
    config, folder = read_run([str(run)])
    open_link = open_link_to(config.hub, operator)
    stop = StopRequest().install()
    pool = POOLS[kind](config, place)

    def has_ended() -> bool:
        ended = read_end(folder)
        return ended is not None and ended.outcome is not None

    reconcile(pool, lambda: ask_status(open_link, config.hub.address, folder), has_ended, stop)
