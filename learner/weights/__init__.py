"""Bring new weights to the actors."""
