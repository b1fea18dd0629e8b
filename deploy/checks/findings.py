"""The findings of a check before the start: mistakes, which keep the run from starting, warnings, and notes to show."""

from typing import Literal

import msgspec

from offbeat.common.errors import SettingError


class Finding(msgspec.Struct, frozen=True):
    """One result of a check."""

    kind: Literal["mistake", "warning", "note"]
    text: str


def mistake(setting: str, value: object, problem: str, cure: str) -> Finding:
    """Return a mistake of the user as `SettingError` words it."""
    return Finding("mistake", str(SettingError(setting, value, problem, cure)))
