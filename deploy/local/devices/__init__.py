"""Decide which process of a run works on which GPU, with how much of its memory."""
