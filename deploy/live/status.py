"""`offbeat status`: asks a running learner over its hub for the state of the run, and prints the answer."""

import time

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offbeat.common.shutdown import ServiceError, StopRequest
from offbeat.deploy.live.link import OpenLink, ask
from offbeat.lab.terminal import stdout_console
from offbeat.protocols.messages import MemberStatus, SettingChange, StatusReport, StatusRequest

WATCH_INTERVAL_S = 1.0
"""Seconds between two questions of `--watch`."""


def print_status(open_link: OpenLink, address: str, *, as_json: bool) -> None:
    """Ask once and print the answer; raise `ServiceError` when there is none."""
    with open_link() as link:
        report = ask(link, address, StatusRequest(), StatusReport)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        stdout_console().print(render_status(report))


def watch_status(open_link: OpenLink, address: str, stop: StopRequest) -> None:
    """Ask every second until a signal and show the newest answer, or the error when the learner does not answer."""
    with open_link() as link, Live(refresh_per_second=4) as live:
        while not stop:
            try:
                live.update(render_status(ask(link, address, StatusRequest(), StatusReport)))
            except ServiceError as error:
                live.update(Text(str(error), style="red"))
            time.sleep(WATCH_INTERVAL_S)


def render_status(report: StatusReport) -> RenderableType:
    """Return the report as text and tables."""
    head = Text()
    head.append(f"run {report.run_id}", style="bold")
    head.append(f"   step {report.policy_version} of {report.num_steps}   up {_duration(report.uptime_s)}\n")
    head.append(f"{report.doing} for {report.doing_s:.1f} s", style="cyan")
    head.append(f"   weights published: {report.published_version}\n")
    if report.waiting_for:
        head.append(f"next batch waits for: {report.waiting_for}\n")
    head.append(f"buffer: {report.num_ready} groups ready, {report.num_generating} leases in flight")
    head.append(f"   epoch {report.epoch} ({report.epoch_position:.0%})   log {report.log_bytes / 2**20:.1f} MB\n")
    head.append("ledger: " + "   ".join(f"{name} {number}" for name, number in report.ledger.items()))
    problems = [Text(f"! {problem}", style="yellow") for problem in report.problems]
    tuned = [Text(_tuned(change), style="cyan") for change in report.changed_settings]
    parts: list[RenderableType] = [head, *problems, *tuned, _members(report)]
    if report.rejected:
        parts.append(_rejected(report.rejected))
    return Group(*parts)


def _tuned(change: SettingChange) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.at))
    return (
        f"set: {change.setting} = {change.after} (config: {change.before}), by {change.who} at version "
        f"{change.policy_version}, {at}"
    )


def _members(report: StatusReport) -> RenderableType:
    if not report.members:
        return Text("no actor is connected", style="yellow")
    table = Table("actor", "state", "version", "lag", "leases", "tokens/s", "last seen", "engine")
    for member in report.members:
        lag = "" if member.policy_version < 0 else str(max(0, report.policy_version - member.policy_version))
        table.add_row(
            Text(member.name),
            Text(member.state, style=_style(member)),
            "-" if member.policy_version < 0 else str(member.policy_version),
            lag,
            f"{member.num_leases}/{member.capacity}",
            f"{member.tokens_per_s:.0f}",
            f"{member.last_seen_s:.1f} s",
            # Not a plain text, in which rich would look for markup: an actor chose it.
            Text(member.engine),
        )
    return table


def _rejected(rejected: dict[str, int]) -> Table:
    table = Table("refused", "times")
    for what, times in sorted(rejected.items(), key=lambda item: -item[1])[:20]:
        table.add_row(Text(what), str(times))
    return table


def _style(member: MemberStatus) -> str:
    return {"working": "green", "new": "cyan"}.get(member.state, "red")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
