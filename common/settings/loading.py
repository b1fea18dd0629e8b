"""A run's settings as text: read from TOML and the command line, written back as TOML, explained one by one.

`common.settings.config` declares the settings; `common.settings.checks` refuses contradictions between them.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect as types
from msgspec.structs import FieldInfo

from offbeat.common.errors import SettingError, collect_errors
from offbeat.common.formats import has_mask, masked, shown, to_toml
from offbeat.common.settings.completion import FILLED_IN, complete
from offbeat.common.settings.config import Config, TaskSection
from offbeat.common.settings.corrections import CORRECTIONS, parse_corrections
from offbeat.common.settings.objectives import DEFAULTS, parse_objective
from offbeat.common.settings.section import Section, field_docstrings

LARGEST_NUMBER = 2**53
"""Largest whole number of a setting: floats count exactly up to here."""

ALIASES = {"staleness.max_off_policy_steps": "max_staleness"}
"""Names from other systems, as `section.key`, with the key of the setting they stand for."""

_METHODS: dict[str, tuple[Callable[[str], object], str]] = {
    "loss.objective": (parse_objective, f"one of {', '.join(DEFAULTS)}, with its parameters or without"),
    "loss.correction": (
        parse_corrections,
        f"none, or {', '.join(CORRECTIONS)} or module:function, with bounds or without, several joined by +",
    ),
}
"""Settings that name methods: the function that raises `SettingError` for a mistake in the text, and the accepted values."""

TRUNCATING = ("top_p", "top_k", "min_p")
"""Sampling parameters that other systems have, and that no setting of `[rollout]` may be."""

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".arrow")
"""Suffixes of data files."""


class Explanation(NamedTuple):
    """One setting, described."""

    setting: str
    """`section.key`."""
    type: str
    """The accepted values, in words."""
    default: str
    """The default value, as TOML."""
    text: str
    """The docstring of the setting."""


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Return the settings of a TOML file, or the defaults without one, with `section.key=value` overrides applied in order.

    An override may leave out the section where `full_name` does without it.

    Fills in the objective's defaults (`common.settings.completion`). The value of an override is parsed as TOML; text that is
    not TOML is taken as a string, so quotes are rarely needed. Raises `SettingError` for a file that cannot be read, for an
    unknown setting, and for a value of the wrong type or out of range.
    """
    return _load({} if path is None else _read_toml(path), overrides)


def load_text(text: str, overrides: Sequence[str] = ()) -> Config:
    """Return the settings of a TOML text, which another service has written, with overrides as `load` applies them."""
    return _load(tomllib.loads(text), overrides)


def _load(data: dict[str, Any], overrides: Sequence[str]) -> Config:
    _replace_aliases(data)
    # Only offbeat writes every section: the values that it filled in are not the user's.
    if overrides and data.keys() == _sections().keys():
        _open_filled_in(data)
    converted: list[Config] = []
    # Values are converted even where an override has failed: all mistakes are reported together.
    collect_errors(
        [*(partial(_apply_override, data, override) for override in overrides), lambda: converted.append(_convert(data))]
    )
    return complete(converted[0])


def _open_filled_in(data: dict[str, Any]) -> None:
    """Remove the values that `complete` would fill in, which may be others beside the overrides."""
    config = _convert(data)
    for setting in FILLED_IN:
        section_name, _, key = setting.partition(".")
        section = msgspec.structs.replace(getattr(config, section_name), **{key: None})
        opened = msgspec.structs.replace(config, **{section_name: section})
        if setting_value(complete(opened), setting) == setting_value(config, setting):
            config = opened
            data[section_name].pop(key, None)


def resolved_toml(config: Config, *, with_secrets: bool = False) -> str:
    """Return all settings as TOML that `load` reads back as the same config; leave out those that are None by default.

    Secrets in tables are masked, unless the text is for a service and goes into a private file (`common.formats`).
    """
    lines: list[str] = []
    for section_name in Config.__struct_fields__:
        section: Section = getattr(config, section_name)
        lines.append(f"[{section_name}]")
        for field in msgspec.structs.fields(section):
            value = getattr(section, field.name)
            if value is not None:
                lines.append(f"{field.name} = {to_toml(value if with_secrets else masked(value))}")
            elif field.default is not None:
                lines.append(f'{field.name} = "none"')
        lines.append("")
    return "\n".join(lines)


@cache
def setting_names() -> tuple[str, ...]:
    """Return every setting, as `section.key`."""
    return tuple(f"{section}.{key}" for section in _sections() for key in _fields(section))


def refuse_masked(config: Config) -> None:
    """Raise `SettingError` for a secret that is masked, as in a run folder's config.toml: a service needs the real one."""
    for setting, table in (
        ("actor.engine_options", config.actor.engine_options),
        ("train.deepspeed", config.train.deepspeed),
        ("judge.options", config.judge.options),
        ("data.template_arguments", config.data.template_arguments),
    ):
        if has_mask(table):
            cure = f"Give the real value, from your own TOML file or as {setting}.NAME=VALUE."
            raise SettingError(setting, table, "a secret in it was masked when these settings were written", cure)


def explain(name: str | None = None) -> str:
    """Return the result of `explanations(name)` as text for a terminal."""
    return "\n\n".join(f"{row.setting} = {row.default}   ({row.type})\n    {row.text}" for row in explanations(name))


def explanations(name: str | None = None) -> list[Explanation]:
    """Describe the settings of a key, a setting named as in `full_name`, the settings of a section, or all.

    Raises `SettingError` for an unknown name.
    """
    if name in _sections():
        return _explain_section(name)
    every = [row for section_name in _sections() for row in _explain_section(section_name)]
    if name is None:
        return every
    # Here a key that several sections have is no mistake.
    of_key = [row for row in every if row.setting.partition(".")[2] == name]
    if of_key:
        return of_key
    setting = ".".join(full_name(name).split(".")[:2])
    return [row for row in every if row.setting == setting]


def full_name(key: str) -> str:
    """Return the `section.key` of a setting given by that name, by a key that only one section has, or by an alias.

    A path into a setting that is a table keeps its end: `actor.engine_options.max_num_seqs`, also without the section. Raises
    `SettingError` for an unknown name and for a key that several sections have.
    """
    section_name, dot, name = key.partition(".")
    if key in ALIASES:
        return f"{section_name}.{ALIASES[key]}"
    every = [*setting_names(), *ALIASES]
    if dot and section_name not in _sections() and any(setting.partition(".")[2] == section_name for setting in every):
        return f"{full_name(section_name)}.{name}"
    if dot:
        _find_field(section_name, name.split(".")[0])
        return key
    found = [setting for setting in every if setting.partition(".")[2] == key]
    if not found:
        if key in TRUNCATING:
            raise _refuse_truncating(key)
        if key in _sections():
            cure = f"Name one of its settings, as in {key}.{next(iter(_fields(key)))}. `offbeat explain {key}` describes them."
            raise SettingError("setting", key, "this is a section", cure)
        close = difflib.get_close_matches(key, [setting.partition(".")[2] for setting in every], n=1, cutoff=0.5)
        meant = [setting for setting in every if setting.partition(".")[2] in close]
        cure = f"Did you mean {' or '.join(meant)}?" if meant else "`offbeat explain` describes all settings."
        raise SettingError("setting", key, "no setting has this name", cure)
    if len(found) > 1:
        raise SettingError("setting", key, f"{len(found)} sections have a setting of this name", f"Write {' or '.join(found)}.")
    return full_name(found[0])


def replace_settings(config: Config, values: Mapping[str, str]) -> Config:
    """Return the config with these settings (`section.key`) replaced; values are texts, parsed like those of overrides.

    Raises `SettingError` for an unknown setting and a value of the wrong type or out of range.
    """
    sections: dict[str, Section] = {}
    for setting, text in values.items():
        section_name, _, key = setting.partition(".")
        field = _find_field(section_name, key)
        value = _convert_value(section_name, field, _parse_value(text, field))
        section = sections.get(section_name) or getattr(config, section_name)
        sections[section_name] = msgspec.structs.replace(section, **{key: value})
    return complete(msgspec.structs.replace(config, **sections))


def setting_value(config: Config, setting: str) -> Any:
    """Return the value of `section.key`."""
    section_name, _, key = setting.partition(".")
    return getattr(getattr(config, section_name), key)


def weighted_reward(task: TaskSection) -> str:
    """Return what judges a completion, `task.reward` with its weights or the environment: equal texts mean equal rewards."""
    if task.environment:
        return f"environment {task.environment}"
    weights = ", ".join(f"{name}={weight:g}" for name, weight in sorted(task.reward_weights.items()))
    return f"{task.reward} ({weights})" if weights else task.reward


def setting_text(config: Config, setting: str) -> str:
    """Return the value of `section.key` as text that `replace_settings` reads back."""
    return shown(setting_value(config, setting))


def is_local_data(source: str) -> bool:
    """Return True when a data setting names a file or folder rather than a dataset of the Hugging Face Hub.

    A path that exists on this machine always does, also as a link that leads nowhere. Any other does by its suffix, or by a
    name that the hub cannot have.
    """
    path = Path(source).expanduser()
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*){0,2}", source) is not None
    return os.path.lexists(path) or path.suffix.lower() in DATA_SUFFIXES or not is_hub_name


@cache
def _sections() -> dict[str, type[Section]]:
    return {field.name: field.type for field in msgspec.structs.fields(Config)}


@cache
def _fields(section_name: str) -> dict[str, FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(_sections()[section_name])}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        problem = f"the file cannot be read ({error.strerror})"
        raise SettingError("config file", str(path), problem, "Give the path of a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError("config file", str(path), f"the file is not valid TOML: {error}", "Correct that line.") from error


def _replace_aliases(data: dict[str, Any]) -> None:
    for alias, key in ALIASES.items():
        section_name, _, name = alias.partition(".")
        table = data.get(section_name)
        if not isinstance(table, dict) or name not in table:
            continue
        if key in table:
            problem = f"this is another name of {section_name}.{key}, which is also set"
            raise SettingError(alias, table[name], problem, "Remove one of the two.")
        table[key] = table.pop(name)


def _apply_override(data: dict[str, Any], override: str) -> None:
    """Set one value in the nested tables of a config file; the path may lead into a setting that is itself a table."""
    setting, equals, raw = override.partition("=")
    if not equals:
        raise SettingError("override", override, "it has no value", "Write section.key=value.")
    setting = full_name(setting.strip())
    section_name, *path = setting.split(".")
    field = _find_field(section_name, path[0])
    value = _parse_value(raw, field)
    if len(path) > 1 and not _may_be_table(types.type_info(field.type)):
        raise SettingError(setting, value, f"{section_name}.{path[0]} is not a table", f"Write {section_name}.{path[0]}=VALUE.")
    table = data
    for key in (section_name, *path[:-1]):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise SettingError(setting, value, f"{key} is not a table in the config file", "Make it a table there.")
    table[path[-1]] = value


def _may_be_table(accepted: types.Type) -> bool:
    alternatives = accepted.types if isinstance(accepted, types.UnionType) else (accepted,)
    return any(isinstance(alternative, types.DictType) for alternative in alternatives)


def _parse_value(raw: str, field: FieldInfo) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    # Text with a line break parses as several keys; then it is a string, not a value.
    value = parsed["value"] if len(parsed) == 1 else raw
    return raw if isinstance(types.type_info(field.type), types.StrType) and not isinstance(value, str) else value


def _find_field(section_name: str, key: str) -> FieldInfo:
    sections = _sections()
    if section_name not in sections:
        others = _settings_with(key) or _settings_with(section_name)
        cure = f"Did you mean {' or '.join(others)}?" if others else _did_you_mean(section_name, sections)
        raise SettingError("section", section_name, "no section has this name", cure)
    fields = _fields(section_name)
    if section_name == "rollout" and key in TRUNCATING:
        raise _refuse_truncating(key)
    if key not in fields:
        elsewhere = [f"{name}.{key}" for name in sections if key in _fields(name)]
        found = _did_you_mean(key, fields, f"{section_name}.", others=_settings_with(key))
        cure = f"Did you mean {elsewhere[0]}?" if elsewhere else found
        raise SettingError("setting", f"{section_name}.{key}", "no setting has this name", cure)
    return fields[key]


def _refuse_truncating(key: str) -> SettingError:
    """Return the error for a sampling parameter that would bias training."""
    problem = (
        "it truncates the sampling distribution, so the behavior log-probs would not be those of the trained policy and every "
        "importance ratio would be biased"
    )
    cure = "Leave it out; lower rollout.temperature for less random completions."
    return SettingError("setting", f"rollout.{key}", problem, cure)


def _settings_with(word: str) -> list[str]:
    """Return the settings that have a word in their name, a part of a word not counted."""
    return [setting for setting in setting_names() if word and word in re.split(r"[._]", setting)]


def _did_you_mean(name: str, known: Iterable[str], prefix: str = "", *, others: Sequence[str] = ()) -> str:
    """Return the name that is spelled alike, else other settings that may be meant, else all names."""
    known = list(known)
    # Below this share of equal letters names have little to do with each other: `stop` and `top_p`.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if close:
        return f"Did you mean {prefix}{close[0]}?"
    return f"Did you mean {' or '.join(others)}?" if others else f"The known names are: {', '.join(known)}."


def _convert(data: dict[str, Any]) -> Config:
    """Return the config of nested tables; raise all mistakes in them at once."""
    values: dict[str, dict[str, Any]] = {}

    def convert_section(section_name: str, table: object) -> None:
        if not isinstance(table, dict):
            section = full_name(section_name).partition(".")[0]
            raise SettingError(section_name, table, "it is outside of any section", f"Put it under [{section}].")
        if section_name not in _sections():
            _find_field(section_name, "")
        values[section_name] = {}
        collect_errors([partial(convert, section_name, key, value) for key, value in table.items()])

    def convert(section_name: str, key: str, value: object) -> None:
        values[section_name][key] = _convert_value(section_name, _find_field(section_name, key), value)

    collect_errors([partial(convert_section, section_name, table) for section_name, table in data.items()])
    sections = {name: _sections()[name](**of_section) for name, of_section in values.items()}
    return Config(**sections)  # pyright: ignore[reportArgumentType], each name goes with its own section


def _convert_value(section_name: str, field: FieldInfo, value: Any) -> Any:
    accepted = types.type_info(field.type)
    if value == "none" and isinstance(accepted, types.UnionType) and accepted.includes_none:
        return None
    setting, cure = f"{section_name}.{field.name}", f"Give {_describe(accepted)}."
    # TOML has nan and inf; nan would pass every comparison with a bound.
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(setting, value, "the number is not finite", cure)
    try:
        converted = msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        raise SettingError(setting, value, "the value is not accepted", cure) from error
    if isinstance(converted, int) and converted > LARGEST_NUMBER:
        raise SettingError(setting, value, f"the number is above {LARGEST_NUMBER}", cure)
    if setting in _METHODS and isinstance(converted, str):
        _METHODS[setting][0](converted)
    return converted


def _describe(accepted: types.Type) -> str:
    """Return the accepted values in words: "a whole number, at least 1"."""
    match accepted:
        case types.BoolType():
            return "true or false"
        case types.IntType(ge=low, le=high, gt=above):
            return "a whole number" + _describe_range(low, high, above)
        case types.FloatType(ge=low, le=high, gt=above):
            return "a number" + _describe_range(low, high, above)
        case types.StrType(pattern=pattern):
            return "text" if pattern is None else f"text that matches {pattern}"
        case types.LiteralType(values=values):
            return "one of " + ", ".join(to_toml(value) for value in values)
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            return f"a list, each entry {_describe(item)}"
        case types.TupleType(item_types=items):
            return f"a list of {len(items)}, each entry {_describe(items[0])}"
        case types.DictType():
            return "a table"
        case types.UnionType(types=alternatives):
            return " or ".join(_describe(alternative) for alternative in alternatives)
        case types.NoneType():
            return '"none"'
    raise AssertionError(f"no setting is a {accepted}")


def _describe_range(low: float | None, high: float | None, above: float | None) -> str:
    parts = [(low, "at least"), (above, "above"), (high, "at most")]
    return "".join(f", {word} {to_toml(bound)}" for bound, word in parts if bound is not None)


def _explain_section(section_name: str) -> list[Explanation]:
    docstrings = field_docstrings(_sections()[section_name])
    rows: list[Explanation] = []
    for field in _fields(section_name).values():
        value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        default = "none" if value is None else to_toml(value)
        setting = f"{section_name}.{field.name}"
        kind = _METHODS[setting][1] if setting in _METHODS else _describe(types.type_info(field.type))
        rows.append(Explanation(setting, kind, default, docstrings[field.name]))
    return rows
