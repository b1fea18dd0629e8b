"""The processes of a run, started and ended: command line, launcher, quick start, sweep, chaos."""
