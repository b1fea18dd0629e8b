"""Start and end the processes of a run: command line, launcher, quick start, sweep, clusters."""
