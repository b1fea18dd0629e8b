"""A run's settings as text: read from TOML and the command line, written back as TOML, explained one by one.

What each setting is stands in `common.config`; which of them contradict each other, in `common.setting_checks`.
"""

import ast
import difflib
import inspect
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect as types
from msgspec.structs import FieldInfo

from offbeat.common import config as config_module
from offbeat.common.config import Config, Section
from offbeat.common.objectives import complete

ALIASES = {"staleness.max_off_policy_steps": "max_staleness"}
"""Settings under the names that users of other systems know them by."""


class SettingError(Exception):
    """A mistake of the user's: the text names the setting, its value, what is wrong and what to do."""

    def __init__(self, setting: str, value: object, problem: str, cure: str) -> None:
        super().__init__(f"{setting} = {_shown(value)}: {problem}. {cure}")
        self.setting = setting


class Explanation(NamedTuple):
    """One setting, described."""

    setting: str
    """`section.key`."""
    type: str
    """The values it takes, in words."""
    default: str
    """As TOML."""
    text: str
    """Its docstring."""


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The settings of a TOML file, or the defaults without one, with `section.key=value` overrides applied in order.

    What the objective decides where it is left open is filled in (`common.objectives`).
    The value of an override is read as TOML; what is not TOML is taken as text, so quotes are rarely needed. Raises
    `SettingError` for a file that cannot be read, an unknown setting and a value of the wrong type or out of range.
    """
    data: dict[str, Any] = {} if path is None else _read_toml(path)
    _replace_aliases(data)
    for override in overrides:
        _apply_override(data, override)
    return complete(_convert(data))


def resolved_toml(config: Config) -> str:
    """Every setting as TOML that `load` reads back as the same config; settings that are None by default are left out."""
    lines: list[str] = []
    for section_name in Config.__struct_fields__:
        section: Section = getattr(config, section_name)
        lines.append(f"[{section_name}]")
        for field in msgspec.structs.fields(section):
            value = getattr(section, field.name)
            if value is not None:
                lines.append(f"{field.name} = {_to_toml(value)}")
            elif field.default is not None:
                lines.append(f'{field.name} = "none"')
        lines.append("")
    return "\n".join(lines)


def explain(name: str = "") -> str:
    """What `explanations` gives, as text for a terminal."""
    return "\n\n".join(f"{row.setting} = {row.default}   ({row.type})\n    {row.text}" for row in explanations(name))


def explanations(name: str = "") -> list[Explanation]:
    """The setting `section.key`, or those of a section, or all; `SettingError` when there is none of that name."""
    every = [row for section_name in _sections() for row in _explain_section(section_name)]
    wanted = [row for row in every if name in ("", row.setting, row.setting.split(".")[0])]
    if not wanted:
        names = [*_sections(), *(row.setting for row in every)]
        raise SettingError("setting", name, "there is none of that name", _did_you_mean(name, names))
    return wanted


def full_name(key: str) -> str:
    """The `section.key` of a setting that is named so, or by a key that only one section has, or by an alias.

    A path into a setting that is a table stays: `actor.engine_options.max_num_seqs`. `SettingError` when there is none of
    that name, or several.
    """
    section_name, dot, name = key.partition(".")
    if key in ALIASES:
        return f"{section_name}.{ALIASES[key]}"
    if dot:
        _find_field(section_name, name.split(".")[0])
        return key
    every = [*(f"{section}.{name}" for section in _sections() for name in _fields(section)), *ALIASES]
    found = [setting for setting in every if setting.partition(".")[2] == key]
    if not found:
        close = difflib.get_close_matches(key, [setting.partition(".")[2] for setting in every], n=1, cutoff=0.5)
        meant = [setting for setting in every if setting.partition(".")[2] in close]
        cure = f"Did you mean {' or '.join(meant)}?" if meant else "`offbeat check --explain` describes all settings."
        raise SettingError("setting", key, "there is none of that name", cure)
    if len(found) > 1:
        raise SettingError("setting", key, f"there are {len(found)} of that name", f"Write {' or '.join(found)}.")
    return full_name(found[0])


def replace_settings(config: Config, values: Mapping[str, str]) -> Config:
    """The config with these settings (`section.key`) at other values, each given as text that is read as an override's is.

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


def setting_text(config: Config, setting: str) -> str:
    """The value of `section.key` as text that `replace_settings` reads back."""
    section_name, _, key = setting.partition(".")
    return _shown(getattr(getattr(config, section_name), key))


def is_data_file(source: str) -> bool:
    """Whether a data setting names a JSONL file rather than a Hugging Face dataset."""
    path = Path(source).expanduser()
    return path.suffix in (".jsonl", ".json", ".ndjson") or path.is_file()


def _sections() -> dict[str, type[Section]]:
    return {field.name: field.type for field in msgspec.structs.fields(Config)}


def _fields(section_name: str) -> dict[str, FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(_sections()[section_name])}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise SettingError("config file", str(path), problem, "Give the path of a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError("config file", str(path), f"is not TOML: {error}", "Correct the file there.") from error


def _replace_aliases(data: dict[str, Any]) -> None:
    for alias, key in ALIASES.items():
        section_name, _, name = alias.partition(".")
        table = data.get(section_name)
        if not isinstance(table, dict) or name not in table:
            continue
        if key in table:
            raise SettingError(
                alias, table[name], f"it is another name of {section_name}.{key}, which is set too", "Remove one."
            )
        table[key] = table.pop(name)


def _apply_override(data: dict[str, Any], override: str) -> None:
    """Set one value in the nested tables of a config file; a path may go on into a setting that is a table itself."""
    setting, equals, raw = override.partition("=")
    setting = setting.strip()
    if not equals:
        raise SettingError("override", override, "has no value", "Write section.key=value.")
    section_name, *path = setting.split(".")
    if setting in ALIASES:
        path = [ALIASES[setting]]
    field = _find_field(section_name, path[0] if path else "")
    value = _parse_value(raw, field)
    if len(path) > 1 and not isinstance(types.type_info(field.type), types.DictType):
        raise SettingError(setting, value, f"{section_name}.{path[0]} has no parts", "Give the setting one value.")
    table = data
    for key in (section_name, *path[:-1]):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise SettingError(setting, value, f"{key} is not a table in the config file", "Correct the file.")
    table[path[-1]] = value


def _parse_value(raw: str, field: FieldInfo) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    # More keys than one: the text held a line break, so it was no value.
    value = parsed["value"] if len(parsed) == 1 else raw
    return raw if field.type is str and not isinstance(value, str) else value


def _find_field(section_name: str, key: str) -> FieldInfo:
    sections = _sections()
    if section_name not in sections:
        raise SettingError("section", section_name, "there is none of that name", _did_you_mean(section_name, sections))
    fields = _fields(section_name)
    if key not in fields:
        elsewhere = [f"{name}.{key}" for name in sections if key in _fields(name)]
        cure = f"Did you mean {elsewhere[0]}?" if elsewhere else _did_you_mean(key, fields, f"{section_name}.")
        raise SettingError("setting", f"{section_name}.{key}", "there is none of that name", cure)
    return fields[key]


def _did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {prefix}{close[0]}?" if close else f"There are: {', '.join(known)}."


def _convert(data: dict[str, Any]) -> Config:
    sections: dict[str, Section] = {}
    for section_name, table in data.items():
        if not isinstance(table, dict):
            raise SettingError(section_name, table, "stands outside of any section", "Put it under its [section].")
        if section_name not in _sections():
            _find_field(section_name, "")
        values = {key: _convert_value(section_name, _find_field(section_name, key), table[key]) for key in table}
        sections[section_name] = _sections()[section_name](**values)
    return Config(**sections)  # pyright: ignore[reportArgumentType], each name goes with its own section


def _convert_value(section_name: str, field: FieldInfo, value: Any) -> Any:
    accepted = types.type_info(field.type)
    if value == "none" and isinstance(accepted, types.UnionType) and accepted.includes_none:
        return None
    setting, cure = f"{section_name}.{field.name}", f"Give {_describe(accepted)}."
    # TOML has both; nan would pass every comparison with a bound.
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(setting, value, "is not a finite number", cure)
    try:
        return msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        raise SettingError(setting, value, "is not a value that it takes", cure) from error


def _describe(accepted: types.Type) -> str:
    """The values that a type takes, in words: "a whole number, at least 1"."""
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
            return "one of " + ", ".join(_to_toml(value) for value in values)
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            return f"a list, each of it {_describe(item)}"
        case types.TupleType(item_types=items):
            return f"a list of {len(items)}, each of it {_describe(items[0])}"
        case types.DictType():
            return "a table"
        case types.UnionType(types=alternatives):
            return " or ".join(_describe(alternative) for alternative in alternatives)
        case types.NoneType():
            return '"none"'
    raise AssertionError(f"no setting is a {accepted}")


def _describe_range(low: float | None, high: float | None, above: float | None) -> str:
    parts = [(low, "at least"), (above, "above"), (high, "at most")]
    return "".join(f", {word} {_to_toml(bound)}" for bound, word in parts if bound is not None)


def _explain_section(section_name: str) -> list[Explanation]:
    docstrings = _docstrings(_sections()[section_name].__name__)
    rows: list[Explanation] = []
    for field in _fields(section_name).values():
        value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        default = "none" if value is None else _to_toml(value)
        kind = _describe(types.type_info(field.type))
        rows.append(Explanation(f"{section_name}.{field.name}", kind, default, docstrings[field.name]))
    return rows


def _docstrings(class_name: str) -> dict[str, str]:
    """The text below each attribute of a class in `common.config`, its lines joined."""
    tree = ast.parse(inspect.getsource(config_module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    docstrings: dict[str, str] = {}
    for attribute, text in pairwise(body):
        match attribute, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                docstrings[name] = " ".join(docstring.split())
    return docstrings


def _shown(value: object) -> str:
    return "none" if value is None else _to_toml(value)


def _to_toml(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON escapes what TOML must, but for DEL.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_to_toml(item) for item in value)}]"
        case dict():
            items = (f"{_to_toml(str(key))} = {_to_toml(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
    # What is left of TOML's types: dates and times.
    return str(value)
