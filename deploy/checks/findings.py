"""The findings of a check before the start: mistakes, which keep the run from starting, warnings, and notes to show."""

from collections.abc import Callable, Iterable, Iterator
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


def findings_of(check: Callable[[], Iterable[Finding] | None]) -> Iterator[Finding]:
    """Yield what a check finds. A `SettingError` that it raises, which ends it, is a mistake."""
    try:
        yield from check() or ()
    except SettingError as error:
        yield from (Finding("mistake", text) for text in error.texts)
