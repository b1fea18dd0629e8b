"""Write the report of a run."""
