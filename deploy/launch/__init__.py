"""Start the services of a run on one machine."""
