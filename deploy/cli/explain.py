"""`offbeat explain`: describes settings."""

from typing import Annotated

import typer

from offbeat.common.settings.loading import explain
from offbeat.lab.terminal import page


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SETTING]...", help="Settings, by their own name or as section.key, and sections."),
    ] = None,
) -> None:
    """Describe settings: the values each takes, its default and its meaning. Without a name: every setting."""
    page("\n\n".join(explain(name) for name in names or [None]))
