"""`offbeat explain`: describes settings."""

from typing import Annotated

import typer

from offbeat.common.settings.loading import explain
from offbeat.lab.terminal import page


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SETTING]...", help="Names of settings, as key or section.key, or of sections."),
    ] = None,
) -> None:
    """Describe settings: allowed values, default and meaning. Without a name, describe every setting."""
    page("\n\n".join(explain(name) for name in names or [None]))
