"""What the learner tells about a run: rows, terminal, health, pages and trackers."""
