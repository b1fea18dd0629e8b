"""Programs that run in an environment's own Python. They import nothing of offbeat's."""
