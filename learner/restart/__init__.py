"""What a restarted learner needs: checkpoints, the identity of the run, a mirror of its folder."""
