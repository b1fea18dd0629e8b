"""Traces of a run: the lives of its groups, and the learner's work beside them."""
