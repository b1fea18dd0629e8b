"""`offbeat status`: asks a running learner over its hub for the state of the run, or reads how a run has ended."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from offbeat.common.errors import ServiceError
from offbeat.common.formats import duration
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.run_folder import CHECKPOINTS, MODEL, bytes_of_files
from offbeat.deploy.operating.link import OpenLink, ask_status, ask_status_over
from offbeat.lab.run_summary import EndedRun, ProcessTimes, read_end
from offbeat.lab.terminal import FittedTable, print_result, table
from offbeat.protocols.messages import SettingChange, StatusReport, Vitals

_LEAST_GROWTH_S = 10.0
"""Seconds that a run has taken from which its growth in an hour is told."""
WATCH_INTERVAL_S = 1.0
"""Seconds between two questions of `--watch`."""


class Asked(NamedTuple):
    """The run that an operator asks about."""

    open_link: OpenLink
    address: str
    """Address of its hub."""
    folder: Path
    """The run's folder, which may be on another machine."""
    num_steps: int
    """`train.num_steps`."""


def print_status(asked: Asked, *, as_json: bool) -> None:
    """Print how a run has ended, or ask its learner once and print the answer; raise `ServiceError` when there is neither."""
    times = ProcessTimes()
    ended = read_end(asked.folder, times)
    # Looked for first: at the address of a run that is over, the learner of another run may answer.
    if ended is not None and ended.outcome is not None:
        print_result(
            ended, Group(render_end(ended, asked.num_steps), *render_files(asked.folder, times.wall_s)), as_json=as_json
        )
        return
    try:
        report = ask_status(asked.open_link, asked.address, asked.folder)
    except ServiceError as error:
        if ended is None:
            raise
        print_result(ended, render_end(ended, asked.num_steps), as_json=as_json)
        quiet_s = max(0.0, time.time() - ended.last_time)
        raise ServiceError(f"{error}; its rows end {quiet_s:.0f} s ago without a final one: it hangs or was killed") from error
    print_result(report, Group(render_status(report), *render_files(asked.folder, times.wall_s)), as_json=as_json)


def watch_status(asked: Asked, stop: StopRequest) -> None:
    """Ask every second until a signal or the run's end; show the newest answer, or the error when the learner gives none."""
    with asked.open_link() as link, Live(refresh_per_second=4) as live:
        ended = read_end(asked.folder)
        while not stop and (ended is None or ended.outcome is None):
            try:
                live.update(render_status(ask_status_over(link, asked.address, asked.folder)))
                time.sleep(WATCH_INTERVAL_S)
            except ServiceError as error:
                live.update(Text(str(error), style="red"))
                ended = read_end(asked.folder)
        if ended is not None and ended.outcome is not None:
            live.update(render_end(ended, asked.num_steps))


def render_end(ended: EndedRun, num_steps: int) -> RenderableType:
    """Return the end of a run as text; `num_steps` is `train.num_steps`."""
    good = ended.outcome == "finished"
    head = Text(f"{ended.outcome or 'no final row'}", style="bold green" if good else "bold red")
    head.append(f": step {ended.policy_version} of {num_steps}", style="bold")
    if ended.wall_s is not None:
        head.append(f"   wall time {ended.wall_s:,.0f} s")
    if ended.reward is not None:
        head.append(f"   reward {ended.reward:.3f} at the last step")
    # Texts, not markup: rows are files that anybody may have written.
    lines = [Text(ended.detail, style="red")] if ended.detail else []
    lines += [Text(f"! {reason}", style="yellow") for reason in ended.health.values()]
    lines += [Text(f"set: {change}", style="cyan") for change in ended.changed_settings]
    return Group(head, *lines)


def render_status(report: StatusReport) -> RenderableType:
    """Return the report as text and tables."""
    head = Text()
    head.append(f"run {report.run_id}", style="bold")
    head.append(f"   step {report.policy_version} of {report.num_steps}   up {duration(report.uptime_s)}\n")
    head.append(f"{report.doing} for {report.doing_s:.1f} s", style="cyan")
    head.append(f"   weights published: {report.published_version}\n")
    head.append(f"{_vitals(report, report.vitals)}\n")
    if report.waiting_for:
        head.append(f"next batch waits for: {report.waiting_for}\n")
    head.append(f"buffer: {report.num_ready} groups ready, {report.num_generating} leases in flight")
    head.append(f"   epoch {report.epoch} ({report.epoch_position:.0%})   log {report.log_bytes / 2**20:.1f} MB\n")
    head.append("ledger: " + "   ".join(f"{name} {number}" for name, number in report.ledger.items()))
    head.append(f"\nactors: {len(report.members)} connected, {report.actors_wanted} wanted")
    problems = [Text(f"! {problem}", style="yellow") for problem in (*report.vitals.health, *report.problems)]
    tuned = [Text(_tuned(change), style="cyan") for change in report.changed_settings]
    members = _members(report) if report.members else Text("no actor is connected", style="yellow")
    parts: list[RenderableType] = [head, *problems, *tuned, members]
    if report.rejected:
        most = sorted(report.rejected.items(), key=lambda item: -item[1])[:20]
        parts += [Text(), table(("refused", "times"), [(what, str(times)) for what, times in most])]
    return Group(*parts)


def render_files(folder: Path, wall_s: float) -> Iterator[Text]:
    """Yield the disk that the files of a run of `wall_s` take, and by how much they grow; nothing where there is no folder."""
    sizes = bytes_of_files(folder)
    if not sizes:
        return
    total = sum(sizes.values())
    parts = ", ".join(f"{name} {size / 2**20:,.0f} MB" for name, size in sizes.items())
    text = f"files in {folder}: {total / 2**20:,.0f} MB ({parts})"
    if wall_s >= _LEAST_GROWTH_S:
        grown = sum(size for name, size in sizes.items() if name not in (CHECKPOINTS, MODEL))
        text += f"; {grown / 2**20 / wall_s * 3600:,.0f} MB an hour besides checkpoints"
    yield Text(text)


def _vitals(report: StatusReport, vitals: Vitals) -> str:
    if vitals.reward is None:
        return "no step yet"
    parts = [f"reward {vitals.reward:.3f}"]
    if vitals.reward_by_task:
        parts.append(f"by task: {', '.join(f'{task} {reward:.3f}' for task, reward in vitals.reward_by_task.items())}")
    if vitals.share_by_task:
        parts.append(f"leased: {', '.join(f'{share:.0%} of {task}' for task, share in vitals.share_by_task.items())}")
    if vitals.lag_mean is not None and vitals.lag_max is not None and vitals.bound is not None:
        parts.append(f"lag {vitals.lag_mean:.1f}, largest {vitals.lag_max:.0f}, bound {vitals.bound:.0f}")
    if vitals.step_s is not None:
        left_s = vitals.step_s * (report.num_steps - report.policy_version)
        parts.append(f"{vitals.step_s:.1f} s a step, {duration(left_s)} left")
    return "   ".join(parts)


def _tuned(change: SettingChange) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.at))
    by = f"by {change.who} at version {change.policy_version}"
    return f"set: {change.setting} = {change.after} (config: {change.before}), {by}, {at}"


def _members(report: StatusReport) -> FittedTable:
    head = ("actor", "state", "version", "lag", "leases", "tokens/s", "last seen", "engine")
    rows: list[tuple[str | Text, ...]] = []
    for member in report.members:
        has_weights = member.policy_version >= 0
        lag = max(0, report.policy_version - member.policy_version)
        state = Text(member.state, style={"working": "green", "new": "cyan"}.get(member.state, "red"))
        version, shown_lag = (str(member.policy_version), str(lag)) if has_weights else ("-", "")
        use = (f"{member.num_leases}/{member.capacity}", f"{member.tokens_per_s:.0f}", f"{member.last_seen_s:.1f} s")
        rows.append((member.name, state, version, shown_lag, *use, member.engine))
    dispensable = ("engine", "last seen", "tokens/s", "lag")
    return table(head, rows, texts=("actor", "state", "engine"), dispensable=dispensable)
