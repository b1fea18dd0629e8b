"""The exceptions that users raise. `import offbeat` imports it, so it imports nothing itself."""


class StopRun(Exception):  # noqa: N818, a wish and no mistake of the program
    """Raise it in `metrics.callback` to end the run in order. Its text becomes the reason in the final row."""
