"""Output of the learner about a run: rows, terminal, health, pages and trackers."""
