"""The sets of held-out prompts that `task.eval_data` gives: one path, or a table of named ones."""

from offbeat.common.settings.config import TaskSection


def eval_sets(task: TaskSection) -> dict[str, str]:
    """Return the sources of `task.eval_data` by name; a single one has the name ""."""
    if isinstance(task.eval_data, dict):
        return task.eval_data
    return {"": task.eval_data} if task.eval_data else {}


def eval_setting(name: str) -> str:
    """Return the setting that gives the source of a set."""
    return f"task.eval_data.{name}" if name else "task.eval_data"
