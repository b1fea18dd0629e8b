"""`offbeat replay`: a run's rollout log under other bounds and objectives."""

from typing import Annotated

import typer

from offbeat.common.records.logs import configure_logs
from offbeat.deploy.cli.arguments import RunFolder, split_list, split_numbers
from offbeat.lab.replay.replay import Request, print_replay, replay_run


def command(
    run: RunFolder,
    staleness: Annotated[str, typer.Option(metavar="0,2,8", help="Bounds: values of staleness.max_staleness.")] = "",
    policy: Annotated[str, typer.Option(metavar="gate,drop,abort", help="Values of staleness.staleness_policy.")] = "",
    selection: Annotated[str, typer.Option(metavar="oldest_lease,first_finished", help="Values of staleness.selection.")] = "",
    loss: Annotated[
        str, typer.Option(metavar="gspo,sapo,...", help="Compare the gradients of these objectives at the run's checkpoints.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Replay a run's rollout log with other staleness bounds, orders or objectives, and say what that cannot tell.

    Exit status 1 if a replay with the recorded settings differs from the recording.
    """
    configure_logs("replay")
    bounds = split_numbers("--staleness", staleness, at_least=0)
    request = Request(tuple(bounds), *(tuple(split_list(text)) for text in (policy, selection, loss)))
    report = replay_run(run, request)
    print_replay(report, as_json=as_json)
    raise typer.Exit(1 if report.differences else 0)
