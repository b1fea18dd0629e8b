"""`offbeat keygen`: key files for runs beyond one machine."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.deploy.local.keygen import instructions, make_keys


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the key files.")],
    actors: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ACTOR]...", help="Names of actors. A name that ends in * is for a fleet that shares one key."),
    ] = None,
    operators: Annotated[
        list[str] | None, typer.Option("--operator", metavar="NAME", help="Name of an additional operator.")
    ] = None,
) -> None:
    """Generate the keys that learner and actors use to recognize each other, needed for more than one machine."""
    typer.echo(instructions(folder, make_keys(folder, actors or [], operators or [])))
