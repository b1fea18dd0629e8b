"""Predict a run under a simulated clock."""
