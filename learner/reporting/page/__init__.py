"""The live page of a run, and its numbers for Prometheus."""
