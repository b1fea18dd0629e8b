"""The sets of held-out prompts that `data.eval_data` gives: one path, or a table of named ones."""

from offbeat.common.settings.config import DataSection


def eval_sets(data: DataSection) -> dict[str, str]:
    """Return the sources of `data.eval_data` by name; a single one has the name ""."""
    if isinstance(data.eval_data, dict):
        return data.eval_data
    return {"": data.eval_data} if data.eval_data else {}


def eval_setting(name: str) -> str:
    """Return the setting that gives the source of a set."""
    return f"data.eval_data.{name}" if name else "data.eval_data"
