"""Checks of lessons, by kind: each installs the learner's functions in llorch and runs the verification."""
