"""The settings of a run as its folder tells them, of whatever version of offbeat made it."""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.common.records.run_folder import CONFIG_FILE


class RunSettings(NamedTuple):
    """The settings of a run as text and, where they could be read, by section."""

    text: str
    sections: Mapping[str, Any]

    def setting(self, section: str, name: str) -> Any:
        """Return the setting's value; None where the version that made the run did not have it."""
        found = self.sections.get(section)
        return found.get(name) if isinstance(found, dict) else None

    def number(self, section: str, name: str) -> float | None:
        """Return the setting's value if it is a finite number, else None."""
        value = self.setting(section, name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None

    def flat(self) -> dict[str, str]:
        """Return all settings as text by their full names: `staleness.max_staleness`."""
        return dict(_flatten(self.sections))


def read_settings(run_folder: Path) -> RunSettings:
    """Return the settings of a run; none where its config is missing or damaged."""
    try:
        text = (run_folder / CONFIG_FILE).read_text(encoding="utf-8")
        return RunSettings(text, tomllib.loads(text))
    except FileNotFoundError:
        return RunSettings("", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return RunSettings(f"# {CONFIG_FILE} could not be read: {error}", {})


def _flatten(sections: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in sections.items():
        if isinstance(value, dict):
            pairs += _flatten(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, value if isinstance(value, str) else repr(value)))
    return pairs
