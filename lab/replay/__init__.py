"""Replay a recorded run under other settings."""
