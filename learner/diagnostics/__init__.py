"""Measurements of a training step, which change nothing."""
