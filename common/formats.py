"""Numbers, durations and lists as people read them: on pages, in terminals and in log lines."""

from collections.abc import Sequence


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
