"""Run the quick start under faults, and audit what is left."""
