"""Samples: engines, rewards, outbox, weight receiver."""
