"""`offbeat audit`: the accounts of a run, checked."""

import typer

from offbeat.common.settings import SettingError, load
from offbeat.deploy.commands.arguments import RunFolder
from offbeat.lab.audit import audit, print_checks


def command(run: RunFolder) -> None:
    """Follow every lease of a run through its log and report violations; exit status 1 if there are any."""
    config_file = run / "config.toml"
    if not config_file.exists():
        raise SettingError("RUN", str(run), "it has no config.toml", "Name the folder of a run.")
    raise typer.Exit(0 if print_checks(audit(run, load(config_file))) else 1)
