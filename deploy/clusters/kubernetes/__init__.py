"""Actors and learners on Kubernetes: manifests to apply, and a pool that starts actors."""
