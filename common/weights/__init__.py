"""Weights as bytes: one flat buffer, differences of two, and the collectives that carry them."""
