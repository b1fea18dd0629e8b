"""The rows of the probe: bias and variance of a method's gradient at one staleness."""

import msgspec

PROBE_FILE = "probe.jsonl"


class ProbeRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One method's gradient at one policy: a line of `probe.jsonl`. `lab.study.probe` has the definitions."""

    task: str
    method: str
    lag: int
    seed: int
    cosine: float | None
    """Cosine of the expected gradient on stale completions with that on fresh ones; None where the batches are too few."""
    variance: float | None
    """Variance of the gradient over the square of its expectation's norm; None where that is not told from 0."""
    total_variation: float
    """Between pi and mu, over completions; the same for all methods."""
    chi_squared: float
    """Of pi from mu, over completions, as the sample has it: a few weights may decide it."""
