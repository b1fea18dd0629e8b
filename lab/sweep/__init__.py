"""Compare runs that differ in a few settings."""
