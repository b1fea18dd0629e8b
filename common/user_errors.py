"""The exceptions that users raise and catch. `import offbeat` imports it, so it imports nothing itself."""


class StopRun(Exception):  # noqa: N818, a wish and no mistake of the program
    """Raise it in `metrics.callback` to end the run in order. Its text becomes the reason in the final row."""


class RunError(Exception):
    """A run cannot start, or has failed; the text is the one that `offbeat train` prints."""
