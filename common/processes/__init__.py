"""Processes of this machine: their end, their environment, their descriptors and files."""
