"""New weights on their way into an engine."""
