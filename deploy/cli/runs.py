"""`offbeat runs`: the runs in a folder."""

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from offbeat.common.errors import SettingError
from offbeat.lab.comparison.run_list import list_runs, render_runs
from offbeat.lab.terminal import stdout_console


def command(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Folders that hold runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the runs in runs/ or in other folders, the newest last: state, steps, reward, duration and health."""
    folders = folders or [Path("runs")]
    runs = list_runs(folders, time.time())
    if as_json:
        typer.echo(msgspec.json.encode(runs))
    elif runs:
        stdout_console().print(render_runs(runs))
    else:
        told = " ".join(map(str, folders))
        raise SettingError("FOLDER", told, "there is no run in it", "Name a folder that holds the folders of runs.")
