"""An actor's numbers for Prometheus, and its probes."""
