"""The matrix of the study: its tasks, and the processes that run its trials."""
