"""Buckets of policy lags, by which metrics are split."""

import math

LAG_BUCKETS = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9+": (9, math.inf)}
"""Lowest and highest policy lag of each bucket, by the bucket's name."""


def lag_bucket(policy_lag: int) -> str:
    """Return the name of the bucket that holds a policy lag of at least 0."""
    return next(name for name, (lowest, highest) in LAG_BUCKETS.items() if lowest <= policy_lag <= highest)
