"""Make the quick start's data and tiny models."""
