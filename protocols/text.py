"""Text from outside: the pattern that every name matches, and free text made safe to print, log and draw.

Names are compared, counted and become parts of file names, so another one is refused. Free text (a reason, an error of a
user's function) is for people only, so it is kept and its unprintable characters are shown as escapes. `protocols.wire`
applies both to every message that arrives.
"""

import json
import re

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}\Z"
"""Actors, operators, run ids, reasons, settings."""
MAX_CHARACTERS = 2000
"""Longest free text that is kept; the rest is cut."""


def is_name(text: str) -> bool:
    """Return whether `text` may be a name."""
    return re.match(NAME_PATTERN, text) is not None


def as_name(text: str) -> str:
    """Return a name made of `text`, for parts that the user did not choose: the host's name, the account's."""
    return re.sub(r"[^A-Za-z0-9._@-]", "-", text).lstrip("._@-")[:128] or "unnamed"


def encodable(text: str) -> str:
    """Return `text` with half characters shown as escapes: a model's text or a file's name may hold some, no message can."""
    return text.encode(errors="backslashreplace").decode()


def plain(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Return `text` on one line, cut after `max_characters`, with everything unprintable shown as an escape: `\\n`, `\\x1b`.

    Control characters would command the terminal, line breaks would forge lines of the log, and marks of writing direction
    (Unicode's category Cf) would show another text than the one that is there.
    """
    if len(text) > max_characters:
        text = f"{text[:max_characters]}..."
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def plain_json(text: str) -> str:
    """Return the same JSON with everything unprintable in its strings escaped; `text` is without line breaks."""
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)


def plain_tree(value: object) -> object:
    """Return a tree of dicts, lists and scalars with every text in it, keys included, made `plain`."""
    match value:
        case str():
            return plain(value)
        case dict():
            return {plain_tree(key): plain_tree(item) for key, item in value.items()}
        case list() | tuple():
            return [plain_tree(item) for item in value]
        case _:
            return value
