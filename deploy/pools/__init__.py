"""Pools of actors: where a run's actors are started and ended, as many as the run wants."""
