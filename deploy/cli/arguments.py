"""The arguments that several commands share: a config file, settings that override it, a run's folder, lists of numbers."""

import importlib.metadata
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import typer
from msgspec.structs import replace

from offbeat.common.errors import SettingError
from offbeat.common.formats import split_values
from offbeat.common.records.logs import configure_logs
from offbeat.common.records.run_folder import CONFIG_FILE
from offbeat.common.settings.checks import check
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load

logger = logging.getLogger(__name__)

QUICKSTART = Path(__file__).parent.parent / "local" / "quickstart" / "quickstart.toml"
"""The config of commands that are given none."""
SMOLLM2 = QUICKSTART.with_name("smollm2.toml")
"""The config of `offbeat demo`."""

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [SECTION.KEY=VALUE]...", help="A TOML file, and settings that override it."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]
Preflight = Annotated[bool, typer.Option(help="Check files, ports and functions before anything heavy starts.")]
ShardText = Annotated[str, typer.Option("--shard", metavar="I/N", help="Run only part I of N, counted from 0, for job arrays.")]
Operator = Annotated[str, typer.Option(help="Name of the operator whose key to use, if the run has keys.")]

Item = TypeVar("Item")


class Shard(NamedTuple):
    """A part of a list of runs."""

    place: int
    """Counted from 0."""
    number: int
    """Number of parts."""

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return every `number`-th item, from the one at `place` on."""
        return items[self.place :: self.number]


def read_shard(text: str) -> Shard:
    """Return the shard `3/16`; the whole for an empty text. Raise `SettingError` for any other."""
    if not text:
        return Shard(0, 1)
    index, _, number = text.partition("/")
    if not (index.isdecimal() and number.isdecimal() and int(index) < int(number)):
        raise SettingError("--shard", text, "it is not I/N with I from 0 to N - 1", "Write for example --shard 3/16.")
    return Shard(int(index), int(number))


def begin_log(command: str) -> None:
    """Configure the log and say which program begins what, so that something stands on the screen before anything slow."""
    configure_logs(command)
    logger.info("offbeat %s, %s: reading the settings", importlib.metadata.version("offbeat"), command)


def read_config(arguments: list[str] | None, default: Path | None = None) -> Config:
    """Return the config that a command line names, as `load_config`, checked; log the warnings about it.

    Raises `SettingError` for contradictory settings too.
    """
    config = load_config(arguments, default)
    for warning in check(config):
        logger.warning(warning)
    return config


def load_config(arguments: list[str] | None, default: Path | None = None) -> Config:
    """Return the config that a command line names, or the one in `default`, unchecked.

    Raises `SettingError` when no file is named and there is no default, and for settings that are invalid.
    """
    path, overrides = split_arguments(arguments)
    path = path or default
    if path is None:
        raise SettingError("CONFIG", "", "no config file is given", "Name a TOML file, for example: offbeat learner run.toml")
    config = load(path, overrides)
    return replace(config, run=replace(config.run, dir=config.run.dir.replace("{time}", start_time())))


def read_run(arguments: list[str] | None) -> tuple[Config, Path]:
    """Return config and folder of the run that a command line names by its file or its folder, with overrides applied."""
    arguments = list(arguments or [])
    if arguments and (folder := Path(arguments[0])).is_dir():
        file = folder / CONFIG_FILE
        if not file.exists():
            problem = f"there is no run in it yet: a learner writes {CONFIG_FILE} when it has started"
            raise SettingError("RUN", arguments[0], problem, "Try again in a moment, or name the folder of another run.")
        return read_config([str(file), *arguments[1:]]), folder
    if arguments and "=" not in arguments[0] and not Path(arguments[0]).exists():
        raise SettingError("RUN", arguments[0], "there is no such folder", "Name the folder of a run, or its TOML file.")
    config = read_config(arguments)
    return config, Path(config.run.dir)


def split_arguments(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """Split a command line into its config file, None when it begins with a setting, and the settings that follow."""
    arguments = list(arguments or [])
    # A path may contain "=": the folders of a sweep's runs do.
    if arguments and ("=" not in arguments[0] or Path(arguments[0]).is_file()):
        return Path(arguments[0]), arguments[1:]
    return None, arguments


def split_list(text: str) -> list[str]:
    """Return the parts of `a, b(1, 2)`, as `split_values`, each once and without those that are empty."""
    return list(dict.fromkeys(part for part in split_values(text) if part))


def split_numbers(option: str, text: str, *, at_least: int) -> list[int]:
    """Return the whole numbers of `0,2,8`, none for an empty text.

    Raises `SettingError` for anything else and for numbers below `at_least`.
    """
    parts = split_list(text)
    try:
        numbers = [int(part) for part in parts]
    except ValueError as error:
        raise SettingError(option, text, "these are not all whole numbers", f"Write for example {option} 4,8,16.") from error
    if text and not numbers:
        raise SettingError(option, text, "it holds no number", f"Write for example {option} 4,8,16.")
    if numbers and min(numbers) < at_least:
        raise SettingError(option, text, f"{min(numbers)} is below {at_least}", f"Give numbers of at least {at_least}.")
    return numbers


def say_page(page: Path) -> None:
    """Print the path of a page that was written, and how to look at it, which programs that read the path do not get."""
    typer.echo(page)
    typer.echo(f"wrote {page}; open it in a browser: {page.resolve().as_uri()}", err=True)


def start_time() -> str:
    """Return the time of day as names of folders contain it: `20261122-031500`."""
    return time.strftime("%Y%m%d-%H%M%S")
