"""`offbeat deploy`: the files by which a cluster's scheduler starts a run's services."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.common.logs import configure_logs
from offbeat.common.settings import refuse_masked
from offbeat.deploy.clusters.slurm import write_scripts
from offbeat.deploy.commands.arguments import Arguments, read_config, split_arguments

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files; earlier ones are replaced, keys are kept.")]


@app.callback()
def command() -> None:
    """Write plain files, from the run's one TOML file, with which a cluster runs learner and actors."""
    configure_logs("deploy")


@app.command()
def slurm(
    out: Out,
    arguments: Arguments = None,
    actors: Annotated[int | None, typer.Option(min=1, help="Number of actors. [default: launch.num_actors]")] = None,
    learner_options: Annotated[
        list[str] | None,
        typer.Option("--learner", metavar="OPTIONS", help='Options of sbatch for the learner, such as "--gpus-per-node=1".'),
    ] = None,
    actor_options: Annotated[
        list[str] | None,
        typer.Option("--actor", metavar="OPTIONS", help='Options of sbatch for each actor, such as "--partition=spot".'),
    ] = None,
) -> None:
    """Write `learner.sbatch`, `actors.sbatch` and the keys of a run on Slurm. Start it from a folder that all nodes see."""
    config = read_config(arguments)
    refuse_masked(config)
    path, overrides = split_arguments(arguments)
    assert path is not None, "read_config refuses a command line without a file"
    num_actors = config.launch.num_actors if actors is None else actors
    written = write_scripts(config, path, overrides, out, num_actors, learner_options or [], actor_options or [])
    typer.echo(written)
