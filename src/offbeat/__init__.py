"""Asynchronous, off-policy reinforcement learning for language models."""
