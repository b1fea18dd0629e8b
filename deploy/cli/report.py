"""`offbeat report`: the page about a run."""

import typer

from offbeat.common.errors import SettingError
from offbeat.deploy.cli.arguments import RunFolder
from offbeat.lab.report.run_report import write_report


def command(run: RunFolder) -> None:
    """Write RUN/report.html: one self-contained page about the run."""
    try:
        typer.echo(write_report(run))
    except FileNotFoundError as error:
        raise SettingError("RUN", str(run), str(error), "Name the folder of a run.") from error
