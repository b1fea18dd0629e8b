"""`offbeat simulate`: predicts throughput and staleness."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from offbeat.common.records.run_folder import CONFIG_FILE
from offbeat.common.settings.config import actors_wanted
from offbeat.deploy.cli.arguments import Arguments, read_config, split_numbers
from offbeat.lab.simulation.predict import (
    Given,
    fitted_times,
    given_times,
    print_predictions,
    print_scaled,
    simulate,
    simulate_scaled,
)


def command(
    arguments: Arguments = None,
    actors: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of actors. [default: launch.num_actors]")] = "",
    staleness: Annotated[
        str, typer.Option(metavar="N,N,...", help="Staleness bounds. [default: staleness.max_staleness]")
    ] = "",
    fitted: Annotated[
        list[Path] | None,
        typer.Option("--fit", metavar="RUN", help="Take durations from this run. Two runs that differ give a better fit."),
    ] = None,
    completion_s: Annotated[float | None, typer.Option(help="Without --fit: mean seconds of a completion.")] = None,
    sigma: Annotated[float, typer.Option(help="Without --fit: standard deviation of its logarithm.")] = 0.5,
    train_s: Annotated[float | None, typer.Option(help="Without --fit: seconds of an optimizer step.")] = None,
    sync_s: Annotated[float, typer.Option(help="Without --fit: seconds from a step to its weights at the actors.")] = 0.0,
    cores: Annotated[
        int | None,
        typer.Option(
            help="CPU cores that all services share; 0: each has its own. [default: this machine's, if --fit's run used CPUs]"
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Minutes to simulate. Ends earlier if train.num_steps are done.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    scale: Annotated[
        Literal["none", "auto"],
        typer.Option(help="auto: scale.auto changes the number of actors, starting from the first of --actors."),
    ] = "none",
    start_s: Annotated[float, typer.Option(help="For --scale auto: seconds that an actor takes to start.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict throughput, idle time and staleness for other bounds and numbers of actors, without training.

    Runs the learner's own scheduler under a simulated clock. Without CONFIG, uses that of the first run of --fit.
    """
    runs = list(fitted or [])
    config = read_config(arguments, default=runs[0] / CONFIG_FILE if runs else None)
    given = Given(completion_s, sigma, train_s, sync_s)
    source = fitted_times(config, runs, cores) if runs else given_times(config, given, cores)
    numbers = split_numbers("--actors", actors, at_least=1) or [actors_wanted(config)]
    if scale == "auto":
        run = simulate_scaled(config, source, num_actors=numbers[0], start_s=start_s, seconds=60 * minutes, seed=seed)
        print_scaled(run, source, as_json=as_json)
        return
    predictions = simulate(
        config,
        source,
        actors=numbers,
        staleness=split_numbers("--staleness", staleness, at_least=0) or [config.staleness.max_staleness],
        seconds=60 * minutes,
        seed=seed,
    )
    print_predictions(predictions, source, config, as_json=as_json)
