"""`offbeat set`: asks a running learner over its hub to change settings, and prints the outcome."""

import getpass
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from offbeat.common.settings import SettingError, full_name
from offbeat.common.shutdown import ServiceError
from offbeat.deploy.live.link import OpenLink, ask
from offbeat.protocols.messages import LiveSettingsReport, LiveSettingsRequest
from offbeat.protocols.text import as_name


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


def _who() -> str:
    try:
        user = getpass.getuser()
    except KeyError:
        # In a container the user may have a number but no name.
        user = f"uid-{os.getuid()}"
    return as_name(f"{user}@{socket.gethostname()}")
