"""Actors and learner as containers of one machine."""
