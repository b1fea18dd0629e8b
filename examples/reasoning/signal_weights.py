"""A curriculum for any tasks: fewer prompts of those whose groups give no signal, because all completions have one reward."""

LEAST = 0.1
"""Share of the prompts that a task keeps, so that its next results can be seen."""


def weigh(results, policy_version):
    """Weigh each task by the share of its recent groups that have a signal; a task without results counts in full."""
    return {task: max(LEAST, 1 - (result.without_signal or 0)) for task, result in results.items()}
