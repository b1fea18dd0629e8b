"""The report of a run, as one HTML page."""
