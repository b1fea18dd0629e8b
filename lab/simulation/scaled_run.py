"""`offbeat simulate --scale auto`: the moves of the number of actors in a simulated run, with their reasons."""

import msgspec
from msgspec.structs import replace
from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.lab.simulation.predict import Source, simulate_batches, times_text
from offbeat.lab.simulation.scaling import Move, Scaling
from offbeat.lab.terminal import stdout_console


class ScaledRun(msgspec.Struct, frozen=True):
    """A simulated run whose number of actors moved."""

    num_actors: int
    """Actors that it began with."""
    moves: tuple[Move, ...]
    """All decisions of the policy, advice included."""
    num_steps: int
    simulated_s: float
    learner_waits: float
    """Share of its time that the learner waited for rollouts, in the second half of the steps."""


def simulate_scaled(config: Config, source: Source, *, num_actors: int, start_s: float, seconds: float, seed: int) -> ScaledRun:
    """Simulate one run under `scale.auto`; raise `SettingError` for times that bring too few steps."""
    scale = replace(config.scale, auto=True)
    scaling = Scaling(scale, num_actors, config.actor.max_inflight_groups, start_s=start_s)
    batches = simulate_batches(config, source, num_actors=num_actors, seconds=seconds, seed=seed, scaling=scaling)
    late = batches[len(batches) // 2 :]
    if len(late) < 2:
        problem = f"{len(batches)} batches are too few"
        raise SettingError("--minutes", seconds / 60, problem, "Simulate longer, or more train.num_steps.")
    waited_s = sum(batch.waited_s for batch in late[1:])
    return ScaledRun(
        num_actors=num_actors,
        moves=tuple(scaling.moves),
        num_steps=batches[-1].policy_version,
        simulated_s=batches[-1].ended_at,
        learner_waits=waited_s / (late[-1].ended_at - late[0].ended_at),
    )


def print_scaled(run: ScaledRun, source: Source, *, as_json: bool) -> None:
    """Print the run's moves and its end, as a table or as JSON."""
    if as_json:
        told = {"times": times_text(source), "run": msgspec.to_builtins(run)}
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
        return
    console = stdout_console()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("step", "minutes", "actors"):
        table.add_column(column, justify="right")
    table.add_column("why")
    table.add_row("0", "0.0", str(run.num_actors), "begin")
    for move in run.moves:
        table.add_row(str(move.policy_version), f"{move.seconds / 60:.1f}", str(move.wanted), Text(move.reason))
    console.print(table)
    end = f"{run.num_steps} steps in {run.simulated_s / 60:.1f} minutes; in their second half the learner waits"
    console.print(f"{end} {run.learner_waits:.0%} of its time", highlight=False)
    console.print(escape(times_text(source)), highlight=False)
