"""The study "What survives staleness?": exact runs, their rows, and the page about them."""
