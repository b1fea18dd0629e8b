"""Clusters: the files by which a scheduler starts the services of a run, and the pools that start actors."""
