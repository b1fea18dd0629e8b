"""Settings that may change while a run goes on: which they are, what a change must satisfy, and who follows it.

| settings | follow a change |
|---|---|
| `staleness.*` | the next lease, selection and eviction; the automatic bound; the publisher's limit for pulls |
| `actor.max_inflight_groups` | every actor, also one that joins later, by a `CreditLimit` message |
| `loss.clip_low`, `loss.clip_high`, `train.learning_rate` | every rank's trainer, from the next batch on |
| `weights.canary_tolerance` | the next comparison of an engine with the learner |
| `scale.actors` | whoever starts actors: the launcher, or `offbeat reconcile` |
| `scale.*` | the automatic number of actors, at the next step |
"""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec.structs import asdict

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EventRow, Recorder
from offbeat.common.settings.checks import check
from offbeat.common.settings.config import Config, ScaleSection, StalenessSection
from offbeat.common.settings.loading import replace_settings, setting_text
from offbeat.learner.leases.events import Tuned
from offbeat.learner.leases.log_reading import LogFullError
from offbeat.learner.leases.staleness import StalenessPolicy
from offbeat.protocols.messages import LiveSettingsReport, SettingChange

logger = logging.getLogger(__name__)

CREDIT_LIMIT = "actor.max_inflight_groups"
CANARY_TOLERANCE = "weights.canary_tolerance"
CHANGEABLE = (
    *(f"staleness.{name}" for name in StalenessSection.__struct_fields__),
    CREDIT_LIMIT,
    "loss.clip_low",
    "loss.clip_high",
    "train.learning_rate",
    CANARY_TOLERANCE,
    *(f"scale.{name}" for name in ScaleSection.__struct_fields__),
)


class Proposal(NamedTuple):
    """A change that is allowed, and not made yet."""

    settings: dict[str, str]
    """Settings that would get another value than now, as TOML."""
    warnings: list[str]
    """Doubts about the settings that the change would bring."""


class LiveSettings:
    """Owns the settings in force, and the staleness policy that follows them. The dispatcher's lock guards it."""

    def __init__(self, given: Config, changed: Mapping[str, Tuned]) -> None:
        """Take up the settings of the config file, and those changed before a restart.

        `changed` holds the last event that changed each of them. Raises `SettingError` when they contradict the config file.
        """
        self._given = given
        self.changed = dict(changed)
        """The last event that changed each setting, for all that were ever changed."""
        self.config = replace_settings(given, {setting: event.settings[setting] for setting, event in changed.items()})
        """The settings as they are now."""
        self.staleness = StalenessPolicy(self.config.staleness, self.config.train)
        """The staleness bound as it is now."""
        if self.in_force():
            try:
                check(self.config)
            except SettingError as error:
                changes = ", ".join(f"{change.setting} = {change.after}" for change in self.in_force())
                problem = f"the config file contradicts what was changed during the run ({changes}): {error}"
                cure = "Or change the file back to what the run was started with, resume, and use `offbeat set`."
                raise SettingError("run.resume", True, problem, cure) from error

    def propose(self, settings: Mapping[str, str]) -> Proposal:
        """Return the changes that these values of `section.key` (as TOML) would make.

        Raises `SettingError` when one of them is refused, and with it all.
        """
        for setting, text in settings.items():
            if setting not in CHANGEABLE:
                cure = f"These can: {', '.join(CHANGEABLE)}. Some others may change at run.resume=true (docs/resuming.md)."
                raise SettingError(setting, text, "it cannot be changed during a run", cure)
        config = replace_settings(self.config, settings)
        known = check(self.config)
        warnings = [warning for warning in check(config) if warning not in known]
        texts = {setting: setting_text(config, setting) for setting in settings}
        changed = {setting: text for setting, text in texts.items() if text != setting_text(self.config, setting)}
        if changed and not config.log.enabled:
            warnings.append("log.enabled = false: a restart before the next checkpoint undoes the change.")
        return Proposal(changed, warnings)

    def answer(
        self, settings: Mapping[str, str], policy_version: int, change: Callable[[], tuple[SettingChange, ...]]
    ) -> LiveSettingsReport:
        """Return the answer to an operator's request; `change` makes it, and raises where it is refused."""
        try:
            warnings = self.propose(settings).warnings
            changed = change()
        except (SettingError, LogFullError) as error:
            return LiveSettingsReport(policy_version=policy_version, error=str(error))
        return LiveSettingsReport(policy_version=policy_version, changed=changed, warnings=tuple(warnings))

    def apply(self, event: Tuned) -> tuple[SettingChange, ...]:
        """Make a change that was proposed, and return it setting by setting."""
        changes = tuple(_change(event, setting, setting_text(self.config, setting)) for setting in event.settings)
        self.config = replace_settings(self.config, event.settings)
        self.staleness.bounds = self.config.staleness
        self.changed |= dict.fromkeys(event.settings, event)
        return changes

    def in_force(self) -> tuple[SettingChange, ...]:
        """Return the settings that differ from the config file, whose value is `before`."""
        changes = (_change(event, setting, setting_text(self._given, setting)) for setting, event in self.changed.items())
        return tuple(change for change in changes if change.before != change.after)

    @property
    def credit_limit(self) -> int | None:
        """Groups that each actor works on at once; None while every actor's own config says it."""
        return self.config.actor.max_inflight_groups if CREDIT_LIMIT in self.changed else None


def record_change(record: Recorder, change: SettingChange, reason: str) -> None:
    """Log and record one changed setting; `reason` is empty where a person changed it."""
    detail = f"{change.setting} = {change.after}, was {change.before}; by {change.who}{f': {reason}' if reason else ''}"
    logger.info("setting changed at policy version %d: %s", change.policy_version, detail)
    record(EventRow(event="setting_changed", detail=detail, reason=reason, **asdict(change)))


def _change(event: Tuned, setting: str, before: str) -> SettingChange:
    return SettingChange(setting, before, event.settings[setting], event.who, event.at, event.policy_version)
