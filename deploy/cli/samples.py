"""`offbeat samples`: prompts and completions of a run."""

from typing import Annotated

import msgspec
import typer

from offbeat.common.errors import SettingError
from offbeat.deploy.cli.arguments import RunFolder
from offbeat.lab.samples import SamplesRequest, print_evaluation_samples, print_samples, read_evaluation_samples, read_samples
from offbeat.lab.terminal import stdout_console


def command(
    run: RunFolder,
    worst: Annotated[bool, typer.Option("--worst", help="Groups with the lowest reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Groups with the highest reward first.")] = False,
    step: Annotated[int | None, typer.Option(metavar="N", help="Only groups of this optimizer step, counted from 1.")] = None,
    prompt: Annotated[int | None, typer.Option(metavar="ID", help="Only groups of the prompt with this id.")] = None,
    groups: Annotated[int, typer.Option(min=1, help="Groups to show.")] = 4,
    completions: Annotated[int, typer.Option(min=1, help="Completions to show per group.")] = 4,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Show completions of held-out prompts; --step is the evaluated version.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long texts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the groups as JSON, with full texts.")] = False,
) -> None:
    """Show prompts and completions that a run trained on or evaluated, the newest first. The run may still be going."""
    if worst and best:
        raise SettingError("--worst", "", "it contradicts --best", "Give one of them.")
    request = SamplesRequest("worst" if worst else "best" if best else "newest", step, prompt, groups, completions)
    if evaluation:
        samples = read_evaluation_samples(run, request)
        if as_json:
            typer.echo(msgspec.json.encode(samples).decode())
        else:
            print_evaluation_samples(stdout_console(), samples, full=full)
        return
    found = read_samples(run, request)
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        print_samples(stdout_console(), found, full=full)
