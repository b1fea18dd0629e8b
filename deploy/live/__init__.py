"""Ask a running learner, and change its settings."""
