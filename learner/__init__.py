"""Trains: ledger, staleness, batching, losses, trainer, weight publisher, checkpoints."""
