"""The runs of a sweep: their folders and settings, and the processes that make them."""
