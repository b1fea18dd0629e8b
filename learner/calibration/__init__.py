"""The noise between engine and learner, measured, and the clip ranges that follow from it."""
