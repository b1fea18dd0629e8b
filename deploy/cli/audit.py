"""`offbeat audit`: checks the accounts of a run."""

import typer

from offbeat.common.records.run_folder import read_run_config
from offbeat.deploy.cli.arguments import RunFolder
from offbeat.lab.audit import audit, print_checks


def command(run: RunFolder) -> None:
    """Follow every lease of a run through its log and report violations; exit status 1 if there are any."""
    raise typer.Exit(0 if print_checks(audit(run, read_run_config(run))) else 1)
