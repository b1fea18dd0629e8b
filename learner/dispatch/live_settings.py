"""Settings that may change while a run goes on: which, what a change must satisfy, and what is not the config file's now.

| settings | follow a change |
|---|---|
| `staleness.*` | the next lease, selection and eviction; the automatic bound; the publisher's limit for pulls |
| `actor.max_inflight_groups` | every actor, also one that joins later, by a `CreditLimit` message |
| `loss.clip_low`, `loss.clip_high`, `train.learning_rate` | every rank's trainer, from the next batch on |
"""

from collections.abc import Mapping
from typing import NamedTuple

from offbeat.common.config import Config, StalenessSection
from offbeat.common.setting_checks import check
from offbeat.common.settings import SettingError, replace_settings, setting_text
from offbeat.learner.leases.events import Tuned
from offbeat.protocols.messages import SettingChange

CONCURRENCY = "actor.max_inflight_groups"
TUNABLE = (
    *(f"staleness.{name}" for name in StalenessSection.__struct_fields__),
    CONCURRENCY,
    "loss.clip_low",
    "loss.clip_high",
    "train.learning_rate",
)


class Proposal(NamedTuple):
    """A change that is allowed, and not made yet."""

    settings: dict[str, str]
    """What would have another value than now, as TOML."""
    warnings: list[str]
    """What would be allowed then and probably not meant, and is not so now."""


class Tuning:
    """The settings in force. Its holder's lock guards it."""

    def __init__(self, given: Config, tuned: Mapping[str, Tuned]) -> None:
        """`tuned` is what was changed before a restart: for each setting the event that did so last.

        `SettingError` when that contradicts the config file as it is now.
        """
        self._given = given
        self.tuned = dict(tuned)
        """For each setting that was ever changed the event that did so last."""
        self.config = replace_settings(given, {setting: event.settings[setting] for setting, event in tuned.items()})
        """The settings as they are now."""
        if self.in_force():
            try:
                check(self.config)
            except SettingError as error:
                changes = ", ".join(f"{change.setting} = {change.after}" for change in self.in_force())
                raise SettingError(
                    "run.resume",
                    True,
                    f"the config file contradicts what was changed while the run went on ({changes}): {error}",
                    "Or change the file back to what the run was started with, resume, and use `offbeat set`.",
                ) from error

    def propose(self, settings: Mapping[str, str]) -> Proposal:
        """What these values of `section.key` would change; `SettingError` when one is refused, and with it all."""
        for setting, text in settings.items():
            if setting not in TUNABLE:
                raise SettingError(
                    setting,
                    text,
                    "it cannot be changed while the run goes on",
                    f"These can: {', '.join(TUNABLE)}. To change another, stop the run and start it with run.resume=true.",
                )
        config = replace_settings(self.config, settings)
        known = check(self.config)
        warnings = [warning for warning in check(config) if warning not in known]
        texts = {setting: setting_text(config, setting) for setting in settings}
        return Proposal(
            {setting: text for setting, text in texts.items() if text != setting_text(self.config, setting)}, warnings
        )

    def apply(self, event: Tuned) -> tuple[SettingChange, ...]:
        """Make a change that was proposed; what it changed."""
        changes = tuple(_change(event, setting, setting_text(self.config, setting)) for setting in event.settings)
        self.config = replace_settings(self.config, event.settings)
        self.tuned |= dict.fromkeys(event.settings, event)
        return changes

    def in_force(self) -> tuple[SettingChange, ...]:
        """The settings that are not the config file's, whose value is `before`."""
        changes = (_change(event, setting, setting_text(self._given, setting)) for setting, event in self.tuned.items())
        return tuple(change for change in changes if change.before != change.after)


def _change(event: Tuned, setting: str, before: str) -> SettingChange:
    return SettingChange(setting, before, event.settings[setting], event.who, event.at, event.policy_version)
