"""`offbeat set`: asks a running learner over its hub to change settings, and prints the outcome."""

import getpass
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import full_name, replace_settings, setting_text, setting_value
from offbeat.deploy.operating.link import OpenLink, ask
from offbeat.protocols.messages import LiveSettingsReport, LiveSettingsRequest, StatusReport
from offbeat.protocols.text import as_name

LARGE_FACTOR = 10.0
"""Factor between two values of a setting from which on a change is asked back about."""


def requested(arguments: Sequence[str]) -> dict[str, str]:
    """Return the settings of a command line as `section.key` to value.

    Raises `SettingError` for an unknown setting, a missing value and a setting given twice.
    """
    settings: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        setting = full_name(key.strip())
        if not equals or not value.strip():
            raise SettingError(setting, value, "no value is given", f"Write {key}=VALUE.")
        if setting in settings:
            raise SettingError(setting, value, "it is given twice", "Remove one.")
        settings[setting] = value.strip()
    return settings


def refuse_large_changes(status: StatusReport, config: Config, settings: Mapping[str, str]) -> None:
    """Ask the user about each value that differs from the one in force by `LARGE_FACTOR` or more.

    `config` is what the run was started with; `status` says what has changed since. Raises `SettingError` when the answer is
    not yes, or no terminal can be asked.
    """
    in_force = replace_settings(config, {change.setting: change.after for change in status.changed_settings})
    for setting, factor in large_changes(in_force, settings).items():
        before = setting_text(in_force, setting)
        problem = f"it differs from the value in force, {before}, by a factor of {factor:.3g}"
        if not sys.stdin.isatty():
            raise SettingError(setting, settings[setting], problem, "Add --yes if you mean it.")
        print(f"{setting} = {settings[setting]}: {problem}.", file=sys.stderr)
        if input("Change it? [y/N] ").strip().lower() not in ("y", "yes"):
            raise SettingError(setting, settings[setting], "not changed", "Answer yes, or add --yes, to change it.")


def large_changes(in_force: Config, settings: Mapping[str, str]) -> dict[str, float]:
    """Return the settings whose number would change by `LARGE_FACTOR` or more, with the factor; 0 counts as 1.

    Raises `SettingError` for a value of the wrong type or out of range.
    """
    wanted = replace_settings(in_force, settings)
    factors: dict[str, float] = {}
    for setting in settings:
        values = [setting_value(config, setting) for config in (in_force, wanted)]
        # A setting that is none follows other settings: it has no number to compare with.
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            low, high = sorted(value or 1 for value in values)
            factors[setting] = high / low
    return {setting: factor for setting, factor in factors.items() if factor >= LARGE_FACTOR}


def tune(open_link: OpenLink, address: str, settings: Mapping[str, str]) -> bool:
    """Ask for these changes and print them; return False, with the reason on stderr, when the learner refuses.

    Raises `ServiceError` when the learner does not answer.
    """
    with open_link() as link:
        try:
            report = ask(link, address, LiveSettingsRequest(settings=dict(settings), who=_who()), LiveSettingsReport)
        except ServiceError as error:
            hint = "the learner may still make the change: `offbeat status` shows it"
            raise ServiceError(f"{error}; {hint}") from error
    if report.error:
        print(f"error: {report.error}", file=sys.stderr)
        return False
    for change in report.changed:
        print(f"{change.setting}: {change.before} -> {change.after} at policy version {change.policy_version}")
    if not report.changed:
        print("nothing to change: the run has these values already")
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return True


def say_who_follows(num_connected: int, wanted: int) -> None:
    """Say how many actors a run without a launcher has, and who brings their number to `wanted`."""
    if num_connected == wanted:
        return
    itself = f"start {wanted - num_connected} with `offbeat actor`" if num_connected < wanted else "end the others"
    print(
        f"{num_connected} actors are connected, {wanted} are wanted. This run was started without a launcher, so their number "
        f"only changes where `offbeat reconcile` runs; if it does not, {itself} yourself",
        file=sys.stderr,
    )


def _who() -> str:
    try:
        user = getpass.getuser()
    except KeyError:
        # In a container the user may have a number but no name.
        user = f"uid-{os.getuid()}"
    return as_name(f"{user}@{socket.gethostname()}")
