"""Take optimizer steps."""
