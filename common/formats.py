"""Values as text: durations and lists for people, lists from people, and settings as TOML, with secrets masked.

A secret, such as `actor.engine_options.hf_token`, is known by its name. Only the file that hands the settings to a service has
the secrets, and only its owner can read that file.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path


def number(value: float | None, form: str = ".3f") -> str:
    """Return the number by Python's format specification; a dash for None."""
    return "–" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """Return seconds in words: `9.5 s`, `3 min 05 s`, `2 h 10 min`. A negative duration counts as 0."""
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def listed(parts: Sequence[str]) -> str:
    """Return `a`, `a and b` or `a, b and c`."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def split_values(listed: str) -> list[str]:
    """Return the values between commas, but not in brackets or quotes: `[0.9,0.95],[0.8,0.9]` and `a(1,2),b` are two each.

    A quote after a letter is an apostrophe, as in `gspo + paper's band`.
    """
    parts, depth, quote = [""], 0, ""
    for character in listed:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not parts[-1][-1:].isalnum():
            quote = character
        else:
            depth += (character in "[{(") - (character in "]})")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


MASK = "********"
"""Stands for a secret."""

_SECRET_WORDS = {"token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "auth", "apikey"}
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_LOGIN = re.compile(r"://[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Return whether an option of this name holds a secret: it has such a word, or ends in `key`.

    Plurals are counts (`max_num_batched_tokens`), and longer words something else (`tokenizer`).
    """
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and (words[-1] == "key" or not _SECRET_WORDS.isdisjoint(words))


def masked(value: object, name: str = "") -> object:
    """Return a setting's value with every secret text in it masked; `name` is that of the option that holds it, if any."""
    match value:
        case dict():
            return {key: masked(item, name if is_secret(name) else str(key)) for key, item in value.items()}
        case list() | tuple():
            return [masked(item, name) for item in value]
        case str() if value and is_secret(name):
            return MASK
        case _:
            return value


def without_logins(text: str) -> str:
    """Return a text with name and password masked in each address: `https://********@host`."""
    return _LOGIN.sub(f"://{MASK}@", text)


def has_mask(value: object) -> bool:
    """Return whether a secret in this value was masked."""
    match value:
        case dict():
            return any(has_mask(item) for item in value.values())
        case list() | tuple():
            return any(has_mask(item) for item in value)
        case _:
            return value == MASK


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, at any moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        # The file may have been there, with other rights.
        os.fchmod(descriptor, 0o600)
        file.write(text)


def shown(value: object) -> str:
    """Return a value of a setting as TOML, masked; `none` for None."""
    return "none" if value is None else to_toml(masked(value))


def to_toml(value: object) -> str:
    """Return a value of a setting as TOML; `none` for None is for the caller to write."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON escapes all that TOML requires, except DEL.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        case float():
            # Those of NumPy too, which name their type in `repr`.
            return float.__repr__(value)
        case int():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(to_toml(item) for item in value)}]"
        case dict():
            items = (f"{to_toml(str(key))} = {to_toml(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
    # The remaining TOML types: dates and times. NumPy's other numbers are written like these, but for its truth values.
    text = str(value)
    return {"True": "true", "False": "false"}.get(text, text)
