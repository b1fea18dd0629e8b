"""The exceptions that end a service, and those that users raise and catch. `import offbeat` imports it, so it is light."""

import time
from collections.abc import Callable, Iterable, Sequence

from offbeat.common.formats import masked, shown
from offbeat.protocols.text import plain

REPORT_AGAIN_S = 0.1
"""Seconds until a thread that had no memory to report its end tries again."""


class StopRun(Exception):  # noqa: N818, a wish and no mistake of the program
    """Raise it in `metrics.callback` to end the run in order. Its text becomes the reason in the final row."""


class RunError(Exception):
    """A run cannot start, or has failed; the text is the one that `offbeat train` prints."""


class ServiceError(RuntimeError):
    """A service cannot continue; the user reads the text without a traceback. Exit status `GAVE_UP_STATUS`."""


class LostProcessError(ServiceError):
    """A service has lost a process that it cannot work without; starting it again may help. Exit status 1."""


class SettingError(Exception):
    """A mistake of the user; the text names the setting, its value, the problem and the cure."""

    def __init__(self, setting: str, value: object, problem: str, cure: str) -> None:
        # A path into a table (`actor.engine_options.hf_token`) may name a secret; `hub.key` is a setting, and a path.
        name = setting.rpartition(".")[2] if setting.count(".") > 1 else ""
        super().__init__(f"{setting} = {shown(masked(value, name))}: {problem}. {cure}")
        self.setting = setting
        self.texts = (str(self),)


class SeveralSettingsError(SettingError):
    """Several mistakes of the user, reported together; the text has a line for each."""

    def __init__(self, texts: Sequence[str]) -> None:
        Exception.__init__(self, "\n".join(texts))
        self.setting = "several settings"
        self.texts = tuple(texts)


def collect_errors(checks: Iterable[Callable[[], object]]) -> None:
    """Run independent checks; raise the `SettingError` of the only one that raises, or those of all together."""
    errors: list[SettingError] = []
    for check in checks:
        try:
            check()
        except SettingError as error:
            errors.append(error)
    if len(errors) > 1:
        raise SeveralSettingsError([text for error in errors for text in error.texts])
    for error in errors:
        raise error


def pass_on(error: BaseException, report: Callable[[BaseException], None]) -> None:
    """Report the error that ends a thread, again and again while there is no memory for it: others wait for the thread."""
    while True:
        try:
            return report(error)
        except MemoryError:
            time.sleep(REPORT_AGAIN_S)


def one_line(error: BaseException) -> str:
    """Return the type and the message of an error, on one line of at most about 300 characters."""
    return plain(" ".join(f"{type(error).__name__}: {error}".split()), 300)
