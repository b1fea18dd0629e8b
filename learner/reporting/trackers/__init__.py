"""Trackers of experiments: the numbers of a run in Weights & Biases, MLflow and trackio."""
