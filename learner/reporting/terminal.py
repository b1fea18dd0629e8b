"""A running run for people: a live display on a terminal, else a plain log line now and then."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offbeat.common.formats import duration, number
from offbeat.common.records.logs import console as shared_console
from offbeat.common.records.rows import ActorRow, CommitRow, EvalRow, EventRow, FinalRow, Row, StepRow
from offbeat.learner.diagnostics.health import update_troubles

logger = logging.getLogger(__name__)

PLAIN_INTERVAL_S = 2.0
"""Least seconds between two plain lines."""

RATE_WINDOW_S = 10.0
"""Length of the window over which an actor's rate is a mean."""

NUM_RECENT_STEPS = 10
"""Steps over which a step's duration, shares of time and the rate of training are means."""

SPARKLINE_CELLS = 24
MAX_ACTOR_LINES = 12

_LEARNER_WORK = {
    "time/wait_rollouts_s": "waits for rollouts",
    "time/train_s": "trains",
    "time/prepare_s": "prepares batches",
    "time/snapshot_s": "copies weights",
    "time/publish_wait_s": "waits for the last publish",
}
_ACTOR_WORK = {
    "generate": "generates",
    "commit_weights": "takes weights",
    "wait_leases": "waits for leases",
    "wait_weights": "waits for weights",
    "wait_rewards": "waits for rewards",
    "wait_gpu": "sleeps while the learner has the GPU",
}
_ACTOR_EVENTS = {"actor_joined": "joined", "actor_lost": "lost", "actor_left": "left", "actor_excluded": "excluded"}


class Progress:
    """Shows metrics rows as they are written; any thread may call `add`.

    Log lines that go through `common.records.logs` appear above the live display. Leaving the context prints the end line:
    outcome, steps, final reward, wall time.
    """

    def __init__(self, num_steps: int, *, console: Console | None = None, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            num_steps: Optimizer steps in the whole run.
            console: Shows the live display; None: the console that the log goes to.
            clock: Seconds since the epoch, on the same clock as the rows' `time`.
        """
        self._num_steps = num_steps
        self._console = shared_console() if console is None else console
        self._clock = clock
        self._lock = threading.Lock()
        self._started = clock()
        self._steps: deque[StepRow] = deque(maxlen=NUM_RECENT_STEPS)
        self._rewards: list[float] = []
        self._evaluation: EvalRow | None = None
        self._final: FinalRow | None = None
        self._actors: dict[str, _ActorLine] = {}
        self._troubles: dict[str, str] = {}
        """Health rules that hold now, with their reasons."""
        self._last_plain_line = float("-inf")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._started = self._clock()
        if self._console.is_interactive:
            # Transient: the last frame would stay above the end line and say less.
            self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        logger.info("%s", self._end_line(exc_type))

    def add(self, row: Row) -> None:
        """Update the display by one metrics row; kinds that are not displayed do nothing."""
        with self._lock:
            line = self._add_row(row)
        if line and self._live is None:
            logger.info("%s", line)

    def render(self) -> Group:
        """Return the live display as of now."""
        with self._lock:
            reasons = self._troubles.values()
            troubles = [Text(f"! {reason}", style="yellow", overflow="ellipsis", no_wrap=True) for reason in reasons]
            return Group(self._steps_bar(), self._figures(), *troubles, self._actor_table())

    def _add_row(self, row: Row) -> str | None:
        """Update the state; return the plain line that is due, if any."""
        match row:
            case StepRow():
                return self._add_step(row)
            case EvalRow():
                self._evaluation = row
                parts = [f"pass@{k} {number(share)}" for k, share in row.pass_at.items() if k != "1"]
                parts += [f"{name} {number(reward)}" for name, reward in row.sets.items()]
                parts += [f"{name} {number(value)}" for name, value in row.numbers.items()]
                return f"evaluation at version {row.policy_version}: {', '.join([f'reward {number(row.reward)}', *parts])}"
            case ActorRow():
                self._actor(row.actor).add_stats(row)
            case CommitRow():
                self._actor(row.actor).add_commit(row)
            case EventRow(rule=str()):
                update_troubles(self._troubles, row)
            case EventRow(actor=str(name)) if row.event in _ACTOR_EVENTS:
                self._actor(name).status = _ACTOR_EVENTS[row.event]
            case FinalRow():
                self._final = row
            case _:
                pass
        return None

    def _add_step(self, row: StepRow) -> str | None:
        self._steps.append(row)
        reward = row.number("reward/mean")
        if reward is not None:
            self._rewards.append(reward)
        due = self._clock() - self._last_plain_line >= PLAIN_INTERVAL_S or row.policy_version == self._num_steps
        if not due:
            return None
        self._last_plain_line = self._clock()
        return f"step {row.policy_version}/{self._num_steps}  reward {number(reward)}  " + "  ".join(
            (self._drift_text(), self._rates_text(), self._learner_text())
        )

    def _actor(self, name: str) -> "_ActorLine":
        return self._actors.setdefault(name, _ActorLine())

    # The texts, shared by both displays

    def _drift_text(self) -> str:
        if not self._steps:
            return "–"
        row = self._steps[-1]
        lag = f"lag {number(row.number('lag/mean'), '.1f')} (max {number(row.number('lag/max'), '.0f')})"
        clipped, norm = number(row.number("clip/fraction"), ".1%"), number(row.number("loss/grad_norm"), ".3g")
        return f"{lag}  clipped {clipped}  grad norm {norm}"

    def _rates_text(self) -> str:
        generated = sum(actor.tokens_per_s() for actor in self._actors.values() if actor.is_present)
        tokens, seconds = (self._sum(name) for name in ("tokens/trained", "time/step_s"))
        trained = tokens / seconds if seconds else 0.0
        return f"{generated:,.0f} tok/s generated, {trained:,.0f} trained"

    def _learner_text(self) -> str:
        """Return the shares of the learner's time in the recent steps, and how long ago the last step was if that is long."""
        if not self._steps:
            return f"waits for the first rollouts, {duration(self._clock() - self._started)}"
        total = self._sum("time/step_s")
        spent = {words: self._sum(name) for name, words in _LEARNER_WORK.items()}
        shares = [
            f"{words} {seconds / total:.0%}"
            for words, seconds in sorted(spent.items(), key=lambda item: -item[1])
            if total and seconds / total >= 0.01
        ]
        quiet_s = self._clock() - self._steps[-1].time
        if quiet_s > max(5.0, 3 * total / len(self._steps)):
            shares.append(f"no step for {duration(quiet_s)}")
        return ", ".join(shares)

    def _sum(self, name: str) -> float:
        """Return the sum of a metric over the recent steps."""
        return sum(row.number(name) or 0 for row in self._steps)

    def _end_line(self, exc_type: type[BaseException] | None) -> str:
        version = self._steps[-1].policy_version if self._steps else 0
        reward = number(self._rewards[-1] if self._rewards else None)
        wall_s, outcome = self._clock() - self._started, f"failed ({exc_type.__name__})" if exc_type else "ended"
        if self._final is not None:
            wall_s, outcome = self._final.wall_s, self._final.outcome
            version = self._final.policy_version
        return f"{outcome}: step {version}/{self._num_steps}, reward {reward}, {duration(wall_s)}"

    # The live display

    def _steps_bar(self) -> Table:
        version = self._steps[-1].policy_version if self._steps else 0
        elapsed_s = self._clock() - self._started
        recent = [row.number("time/step_s") or 0.0 for row in self._steps]
        remaining = f", {duration(sum(recent) / len(recent) * (self._num_steps - version))} left" if recent else ""
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        bar.add_row(
            Text(f"step {version}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=version),
            Text(f"{duration(elapsed_s)}{remaining}", style="dim"),
        )
        return bar

    def _figures(self) -> Table:
        figures = Table.grid(padding=(0, 2))
        reward = Text(number(self._rewards[-1] if self._rewards else None), style="bold green")
        reward.append(f"  {sparkline(self._rewards, SPARKLINE_CELLS)}", style="green")
        if self._evaluation is not None:
            held_out = f"  held-out {number(self._evaluation.reward)}"
            reward.append(f"{held_out} at {self._evaluation.policy_version}", style="cyan")
        figures.add_row(Text("reward", style="dim"), reward)
        figures.add_row(Text("drift", style="dim"), Text(self._drift_text()))
        figures.add_row(Text("tokens", style="dim"), Text(self._rates_text()))
        row = self._steps[-1] if self._steps else None
        ready, in_flight = (number(row and row.number(name), ".0f") for name in ("buffer/ready", "buffer/in_flight"))
        figures.add_row(Text("buffer", style="dim"), Text(f"{ready} groups ready, {in_flight} in flight"))
        figures.add_row(Text("learner", style="dim"), Text(self._learner_text()))
        return figures

    def _actor_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        # Actors that need attention are never hidden, and those that left come last: in an elastic fleet they grow in number.
        by_attention = sorted(self._actors.items(), key=lambda item: (item[1].status == "left", item[1].is_present, item[0]))
        for name, actor in sorted(by_attention[:MAX_ACTOR_LINES]):
            state, style = actor.state(self._clock())
            rate = f"{actor.tokens_per_s():,.0f} tok/s" if actor.is_present else ""
            version = "no weights yet" if actor.policy_version is None else f"version {actor.policy_version}"
            table.add_row(Text(name, style="bold"), version, Text(rate), Text(state, style=style))
        num_hidden = len(self._actors) - MAX_ACTOR_LINES
        if num_hidden > 0:
            table.add_row(Text(f"and {num_hidden} more", style="dim"))
        return table


class _ActorLine:
    """One actor's line of the live display."""

    def __init__(self) -> None:
        self.status: str | None = None
        """`joined`, `lost`, `left` or `excluded`; None while all is well."""
        self.policy_version: int | None = None
        """The version that the actor's rows report; None before it has weights."""
        self._stats: deque[ActorRow] = deque()
        """Actor rows of the last `RATE_WINDOW_S`, at least two once there were two."""

    @property
    def is_present(self) -> bool:
        return self.status not in ("lost", "left")

    def add_stats(self, row: ActorRow) -> None:
        self.policy_version = row.policy_version
        if self.status == "joined":
            self.status = None
        if self._stats and row.num_generated_tokens < self._stats[-1].num_generated_tokens:
            # The counters of a restarted actor begin again.
            self._stats.clear()
        self._stats.append(row)
        while len(self._stats) > 2 and row.time - self._stats[1].time >= RATE_WINDOW_S:
            self._stats.popleft()

    def add_commit(self, row: CommitRow) -> None:
        self.policy_version = row.policy_version
        if self.status == "excluded":
            self.status = None

    def tokens_per_s(self) -> float:
        if len(self._stats) < 2:
            return 0.0
        first, last = self._stats[0], self._stats[-1]
        seconds = last.time - first.time
        return (last.num_generated_tokens - first.num_generated_tokens) / seconds if seconds > 0 else 0.0

    def state(self, now: float) -> tuple[str, str]:
        """Return the actor's activity in words, and the style to show it in."""
        if self.status == "joined":
            return "joined", "dim"
        if self.status:
            return self.status, "dim" if self.status == "left" else "bold red"
        quiet_s = now - self._stats[-1].time if self._stats else 0.0
        if quiet_s > 5.0:
            return f"silent for {duration(quiet_s)}", "yellow"
        if len(self._stats) < 2:
            return "starts", "dim"
        before, after = self._stats[-2].seconds, self._stats[-1].seconds
        spent = {work: seconds - before.get(work, 0.0) for work, seconds in after.items()}
        work = max(spent, key=spent.__getitem__, default="")
        return _ACTOR_WORK.get(work, work), "green" if work == "generate" else "dim"


def sparkline(values: list[float], num_cells: int) -> str:
    """Draw the values as at most `num_cells` block characters, lowest to highest; each shows the mean of adjacent values."""
    if not values:
        return ""
    num_cells = min(num_cells, len(values))
    edges = [len(values) * cell // num_cells for cell in range(num_cells + 1)]
    cells = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(cells), max(cells)
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[round((cell - low) / (high - low) * 7) if high > low else 0] for cell in cells)
