"""Questions to a running learner, and changes of its settings."""
