"""Actors and learners under Slurm: scripts to submit, and a pool that starts actors."""
