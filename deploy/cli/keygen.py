"""`offbeat keygen`: key files for runs beyond one machine."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.deploy.local.keygen import instructions, make_keys


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the key files go.")],
    actors: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ACTOR]...", help="Names of actors; a name that ends in * is for a fleet that shares a key."),
    ] = None,
    operators: Annotated[list[str] | None, typer.Option("--operator", metavar="NAME", help="Name of another operator.")] = None,
) -> None:
    """Make the keys by which learner and actors recognize each other: needed beyond one machine."""
    typer.echo(instructions(folder, make_keys(folder, actors or [], operators or [])))
