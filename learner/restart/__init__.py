"""State from which a learner restarts: checkpoints, the identity of the run, a mirror of its folder."""
