"""Output of the learner about a run: rows, terminal, pages and trackers."""
