"""Actors as tasks of a Ray cluster."""
