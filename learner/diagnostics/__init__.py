"""Measure a step, and change nothing."""
