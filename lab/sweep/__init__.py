"""The comparison of runs that differ in a few settings."""
