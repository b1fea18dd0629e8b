"""Formulas of tensors: losses, advantages, corrections, aggregation."""
